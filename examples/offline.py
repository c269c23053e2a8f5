"""Generate without a server: ``python examples/offline.py MODEL_FOLDER``."""

import sys

from kvbaton import LLM, SamplingParams


def main(model: str) -> None:
    """Complete two prompts, then answer a chat message."""
    with LLM(model) as llm:
        params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16, seed=1)
        for answer in llm.generate(["Once upon a time", "The capital of France is"], params):
            print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")
        (answer,) = llm.chat([{"role": "user", "content": "Who hands over the baton?"}], params)
        print(answer.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
