"""Gemma 3's images: tower, reading, and prompts whose images see themselves both ways."""

from __future__ import annotations

import io
import json
import shutil
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from kvbaton.engine.build import make_scheduler
from kvbaton.engine.config import EngineConfig
from kvbaton.engine.cuda.warm_up import TrialSteps
from kvbaton.engine.encoder.images import ImageReader
from kvbaton.engine.loader import load_vision
from kvbaton.engine.model_config import load_model_config
from kvbaton.engine.runner import StepOutput
from kvbaton.engine.step import StepPlan
from kvbaton.errors import ConfigError, RequestError
from kvbaton.messages.engine import AddRequest
from kvbaton.text.tokenizer import Tokenizer
from kvbaton.text.vision import VisionText
from tests.engine.test_cuda_runner import RUNNERS, CpuExecutor, driver_of
from tests.engine.test_encoder_cache_manager import CACHED, ENCODED, Node, Start
from tests.support.chats import picture
from tests.support.encoder_items import item_of, values_of
from tests.support.making import making
from tests.support.pictures import GREEDY, Pictures, Prompt, squared

Checkpoint = Callable[..., Path]
ROWS, GRID = 9, (1, 6, 6)
MIXED: list[tuple[Any, ...]] = [
    (5, GRID, 7),
    (1, GRID, 1, GRID, 9),
    (30,),
    (1,),
    (3, GRID, 2, GRID, 40, GRID, 1),
]
WINDOWS = {"longer": 11, "shorter": 4}
"""Than an image: then its first tokens see its last ones, and not the other way round."""


def model_of(checkpoint: Checkpoint, window: int = 11) -> Path:
    config = {"text_config": {"sliding_window": window}}
    return checkpoint(family="gemma3_vl", num_layers=7, tied=True, config=config)


@pytest.fixture(scope="module", params=WINDOWS)
def folder(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Path:
    return model_of(checkpoint, WINDOWS[request.param])


@pytest.fixture(scope="module")
def pictures(folder: Path) -> Pictures:
    return Pictures(folder)


def edited(folder: Path, target: Path, name: str, change: dict[str, Any]) -> Path:
    """A copy of a folder with other entries in a file; of ``a.b`` in what ``a`` holds."""
    copy = Path(shutil.copytree(folder, target / "edited"))
    content = json.loads((copy / name).read_text())
    for key, value in change.items():
        *outer, last = key.split(".")
        place = content
        for part in outer:
            place = place[part]
        place[last] = value
    (copy / name).write_text(json.dumps(content))
    return copy


# --- reading and the tower ---


@pytest.mark.parametrize("size", [(24, 24), (50, 37), (1, 1), (500, 2), (13, 300)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_images_are_read_as_by_transformers(
    checkpoint: Checkpoint, size: tuple[int, int], mode: str
) -> None:
    from transformers.image_utils import load_image
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    folder = model_of(checkpoint)
    noise = np.random.default_rng(size).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, "PNG")
    processor: Any = Gemma3ImageProcessorPil.from_pretrained(folder)
    with Image.open(file) as image:
        expected = processor(images=load_image(image), return_tensors="np")["pixel_values"][0]
    values, grid = values_of(folder, file.getvalue())
    assert grid == GRID
    np.testing.assert_array_equal(squared(values, grid, 2).numpy(), expected)


def test_rows_are_those_of_transformers(folder: Path, pictures: Pictures) -> None:
    tower = load_vision(load_model_config(folder), device=torch.device("cpu"))
    prompt = pictures.prompt(np.random.default_rng(0), GRID, 1, GRID, GRID)
    with torch.inference_mode():
        rows = tower(prompt.patches, [GRID] * 3)
        pixels = pictures.inputs(prompt)["pixel_values"]
        expected = pictures.model.model.get_image_features(pixels, return_dict=True).pooler_output
        assert rows.shape == (3 * ROWS, 1, 64)
        assert_close(rows[:, 0], expected.flatten(0, 1), atol=3e-5, rtol=1e-5)
        narrow = load_vision(load_model_config(folder, "bfloat16"), device=torch.device("cpu"))
        error = (narrow(prompt.patches, [GRID] * 3).float() - rows).abs().mean()
    assert 0 < error < 0.05


def test_weights_are_found_as_transformers_saves_them(
    folder: Path, pictures: Pictures, tmp_path: Path
) -> None:
    """Its newer names lack a part that the published ones have."""
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    (moved / "model.safetensors").unlink()
    pictures.model.save_pretrained(moved)
    values, grid = values_of(folder, picture(1, 30, 20))
    found = []
    for each in (folder, moved):
        model = load_model_config(each)
        assert model.vision == load_model_config(folder).vision
        with torch.inference_mode():
            found.append(load_vision(model, device=torch.device("cpu"))(values, [grid]))
    assert torch.equal(*found)


def test_sizes_of_published_models(tmp_path: Path) -> None:
    """What Google's folder of Gemma 3 4B says of its tower and image processor."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
        "eoi_token_index": 256000, "image_token_index": 262144, "mm_tokens_per_image": 256,
        "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "model_type": "siglip_vision_model", "num_attention_heads": 16,
            "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip
    processor = {
        "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True,
        "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_seq_length": 256,
        "image_processor_type": "Gemma3ImageProcessor", "resample": 2,
        "rescale_factor": 0.00392156862745098, "size": {"height": 896, "width": 896},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    vision, text = load_model_config(tmp_path).require_vision(), VisionText.load(tmp_path)
    assert (vision.depth, vision.num_heads, vision.merge_size) == (27, 16, 4)
    assert (vision.num_position_embeddings, vision.image_token_id) == (4096, 262144)
    assert text is not None
    assert text.measure(1920, 1080) == ((1, 64, 64), 256)
    assert ImageReader(tmp_path).read(ONE).pixels.shape == (4096, 3, 196)


def test_prompts_are_those_of_transformers(folder: Path) -> None:
    """What frames an image joins the text beside it before that is tokenized."""
    from transformers import AutoTokenizer
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    load: Any = AutoTokenizer.from_pretrained
    process: Any = Gemma3Processor(
        Gemma3ImageProcessorPil.from_pretrained(folder), load(folder), image_seq_length=ROWS
    )
    texts, image = ("What is\n", "\nthis, and", "\n\nthat? "), {"type": "image"}
    parts = [{"type": "text", "text": text} for text in texts]
    content = [image, parts[0], image, parts[1], image, image, parts[2]]
    ours = Tokenizer.load(folder)
    assert ours.chat_template is not None
    assert ours.vision is not None
    text = ours.chat_template.render([{"role": "user", "content": content}])
    images = [Image.new("RGB", (20, 30))] * 4
    expected = process(text=text, images=[images], add_special_tokens=False)
    ids = ours.encode(ours.vision.prepare(text), add_special_tokens=False)
    found, items = ours.vision.expand(ids, [ours.vision.item(ONE)] * 4)
    assert [found] == expected["input_ids"]
    seen = [place for i in items for place in range(i.start, i.start + i.length)]
    assert seen == np.flatnonzero(expected["token_type_ids"][0]).tolist()
    said = ours.vision.prepare("<|vision_start|>")
    with pytest.raises(RequestError, match="must not hold the placeholder"):
        ours.vision.expand(ours.encode(said), [])


def test_the_tokenizer_must_have_what_frames_an_image(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="boi_token_index"):
        Tokenizer.load(edited(folder, tmp_path, "config.json", {"boi_token_index": 9999}))


# --- steps ---


@pytest.fixture(params=RUNNERS)
def driver(request: pytest.FixtureRequest, folder: Path, pictures: Pictures, drive: Any) -> Any:
    return driver_of(request.param, folder, pictures.pool, drive)


def test_mixed_batches_generate_what_transformers_does(driver: Any, pictures: Pictures) -> None:
    rng = np.random.default_rng(1)
    prompts = {}
    for parts in MIXED:
        prompt = pictures.prompt(rng, *parts)
        prompts[pictures.add(driver, prompt)] = prompt
    while min(len(driver.tokens[h]) - len(p.ids) for h, p in prompts.items()) < 10:
        work = []
        for handle in rng.permutation(list(prompts))[: rng.integers(1, 5)].tolist():
            count = min(driver.left(handle), int(rng.integers(1, 24)))
            count = pictures.uncut(prompts[handle], driver.computed[handle], count)
            work.append((handle, count, int(count == driver.left(handle))))
        driver.step(*sorted(work, key=lambda item: item[1] > 1))
    for handle, prompt in prompts.items():
        got = driver.tokens[handle][len(prompt.ids) :]
        expected = pictures.greedy_along(prompt, got, len(got))
        assert got == expected, f"items {prompt.items}"


def test_logits_are_those_of_transformers(
    folder: Path, pictures: Pictures, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = drive(folder, block_size=4)
    plain.executor.attach_encoder(pictures.pool)
    seen = plain.record_logits(monkeypatch)
    prompt = pictures.prompt(np.random.default_rng(8), 3, GRID, 1, GRID, 4)
    got = plain.generate(pictures.add(plain, prompt), 5)
    expected = pictures.logits(prompt, got)
    assert_close(torch.cat(seen), expected, atol=1e-4, rtol=1e-4)
    other = Prompt(prompt.ids, prompt.items, prompt.patches.flip(0))
    assert (pictures.logits(other, got) - expected).abs().max() > 0.1, "any image would do"
    causal = pictures.inputs(prompt, got[:-1])
    del causal["token_type_ids"]
    with torch.inference_mode():
        found = pictures.model(**causal).logits[0, len(prompt.ids) - 1 :]
    assert (found - expected).abs().max() > 0.1, "a causal mask would do"


def test_trials_are_of_images_and_of_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of images that are seen whole is another kernel."""
    runner = CpuExecutor(folder).runner
    trial, run = TrialSteps(runner), runner.run
    whole: list[bool] = []

    def record(plan: StepPlan) -> StepOutput:
        whole.extend(bool(step.items) for step in plan.steps)
        return run(plan)

    monkeypatch.setattr(runner, "run", record)
    trial.run([1, 2, 70])
    trial.run([20], prefixes=[50])
    assert whole == [False, True, True, False, False, False, True, False]


def test_a_step_that_ends_in_an_image_is_an_error(
    folder: Path, pictures: Pictures, drive: Any
) -> None:
    plain = drive(folder)
    plain.executor.attach_encoder(pictures.pool)
    handle = pictures.add(plain, pictures.prompt(np.random.default_rng(2), 3, GRID, 4))
    with pytest.raises(AssertionError, match="seen whole"):
        plain.step((handle, 7, 0))


# --- a node ---


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with making(lambda **more: Node(folder, **{"num_blocks": 1000} | more), Node.close) as start:
        yield start


ONE, OTHER, THIRD = picture(1, 40, 32), picture(2, 100, 9), picture(3, 17, 90)


@pytest.mark.parametrize(("chunk", "seqs"), [(9, 1), (12, 4), (17, 2), (2048, 8)])
def test_tokens_are_those_of_transformers_whatever_a_step_holds(
    pictures: Pictures, start: Start, chunk: int, seqs: int
) -> None:
    """Images begin and end at borders of blocks (of 4) and of steps, beside them, and across."""
    node = start(max_num_batched_tokens=chunk, max_num_seqs=seqs)
    prompts = {
        f"r{before}": pictures.prompt_of(before, ONE, 1, OTHER, 3, seed=before)
        for before in (1, 3, 4, 8, 9, 12)
    }
    prompts["three"] = pictures.prompt_of(5, ONE, 2, THIRD, 14, ONE, 1, seed=30)
    prompts["text"] = pictures.prompt_of(30, ONE, 1, seed=31)
    for name, prompt in prompts.items():
        node.add(name, prompt)
    for (name, prompt), got in zip(prompts.items(), node.finish(*prompts), strict=True):
        assert got == pictures.greedy_along(prompt, got, 6), name
    assert node.count(ENCODED) == 3
    node.check_rest()


def test_a_cached_prefix_may_end_in_an_image_of_which_it_is_a_part(
    pictures: Pictures, start: Start
) -> None:
    """The rest of the image is computed, in one step, over the rows that are cached."""
    node = start()
    prompt = pictures.prompt_of(6, ONE, 5)
    node.add("first", prompt)
    assert node.finish("first") == [pictures.generate(prompt, 6)]
    other = Prompt([*prompt.ids[:15], *range(20, 27)], prompt.items, prompt.patches)
    node.add("other", other)
    assert node.finish("other") == [pictures.generate(other, 6)]
    hit = node.count('kvbaton_prompt_tokens_total{source="local_cache"}')
    assert hit == 12, "three blocks, which end with 6 of the image's 9 tokens"
    node.check_rest()


def test_equal_tokens_of_another_image_share_only_what_is_before_it(
    pictures: Pictures, start: Start
) -> None:
    node = start()
    first = pictures.prompt_of(10, ONE, 21)
    other = pictures.prompt_of(10, OTHER, 21)
    assert first.ids == other.ids
    node.add("first", first)
    node.finish("first")
    node.add("other", other)
    assert node.finish("other") == [pictures.generate(other, 6)]
    assert node.count('kvbaton_prompt_tokens_total{source="local_cache"}') == 8
    node.add("again", first)
    assert node.finish("again") == [pictures.generate(first, 6)]
    assert (node.count(ENCODED), node.count(CACHED)) == (2, 0)
    node.check_rest()


def test_preempted_prompts_go_on(folder: Path, pictures: Pictures, start: Start) -> None:
    blocks = 60 if WINDOWS["longer"] in load_model_config(folder).windows else 47
    node = start(num_blocks=blocks, max_model_len=60, max_num_batched_tokens=12, max_num_seqs=4)
    prompts = [pictures.prompt_of(2, picture(i, 40, 32), 4, seed=i) for i in range(4)]
    node.check_all(pictures, prompts, 42)
    assert node.count("kvbaton_preemptions_total") > 0
    node.check_rest()


def test_drafts_change_no_token(pictures: Pictures, start: Start) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    node = start(max_num_batched_tokens=16, max_num_seqs=2, speculative_config=drafts)
    prompts = [pictures.prompt_of(3 + i, picture(i, 40, 32), 5, seed=i) for i in range(4)]
    node.check_all(pictures, prompts, 25)
    assert node.count("kvbaton_spec_decode_num_draft_tokens_total") > 0
    node.check_rest()


def test_drafts_of_others_leave_room_for_an_image(pictures: Pictures, start: Start) -> None:
    """It would come when they are over, or have nothing to guess."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    node = start(max_num_batched_tokens=10, max_num_seqs=2, speculative_config=drafts)
    text = Prompt([20, 30] * 15, (), torch.zeros(0, 48))
    node.add("text", text, 150)
    node.until(lambda: "text" in node.outputs)
    image = pictures.prompt_of(1, ONE, 1)
    node.add("image", image, 2)
    assert node.finish("image") == [pictures.generate(image, 2)]
    before = sum(len(output.token_ids) for output in node.outputs["text"])
    assert before < 40
    (got,) = node.finish("text")
    assert got == pictures.greedy_along(text, got, 150)
    node.check_rest()


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("preprocessor_config.json", {"size": {"height": 48, "width": 24}}, "image_size"),
        ("preprocessor_config.json", {"image_processor_type": "Other"}, "'Other'"),
        ("config.json", {"mm_tokens_per_image": 8}, "mm_tokens_per_image"),
        ("config.json", {"mm_tokens_per_image": 16}, "mm_tokens_per_image"),
        ("config.json", {"vision_config.patch_size": 5}, "patch_size"),
        ("config.json", {"vision_config.hidden_act": "relu"}, "hidden_act"),
        ("config.json", {"vision_config.layer_norm_eps": 1e-5}, "layer_norm_eps"),
        ("config.json", {"vision_config.num_attention_heads": 3}, "hidden_size"),
        ("config.json", {"vision_config.num_hidden_layers": 0}, "num_hidden_layers"),
    ],
    ids=str,
)
def test_unsupported_is_refused_by_name(
    checkpoint: Checkpoint, tmp_path: Path, name: str, change: dict[str, Any], told: str
) -> None:
    folder = edited(model_of(checkpoint), tmp_path, name, change)

    def load() -> None:
        load_model_config(folder)
        ImageReader(folder)

    with pytest.raises(ConfigError, match=told):
        load()


def test_a_step_must_hold_an_image(folder: Path) -> None:
    model = load_model_config(folder)
    config = EngineConfig(model=str(folder), max_num_batched_tokens=15, max_num_seqs=8)
    with pytest.raises(ConfigError, match="at least 16: the 9 tokens of an image"):
        make_scheduler(config, model, (), bytes(32))


def test_what_says_of_itself_to_be_larger_is_refused(
    folder: Path, pictures: Pictures, start: Start
) -> None:
    """Who waited for a step that holds it would wait for ever."""
    node = start(max_num_batched_tokens=16, max_num_seqs=2)
    good = pictures.prompt_of(3, ONE, 20)
    long = msgspec.structs.replace(good.items[0], length=18, grid=(1, 6, 12))
    request = AddRequest(
        request_id="r", token_ids=array("I", good.ids), params=GREEDY, items=(long,)
    )
    with pytest.raises(RequestError, match="at most 9"):
        node.items.check(request)
    vision = VisionText.load(folder)
    assert vision is not None
    assert "grid must be (1, 6, 6)" in (vision.mismatch(long) or "")


def test_without_an_image_processor_text_is_served(
    folder: Path, tmp_path: Path, pictures: Pictures, drive: Any
) -> None:
    alone = Path(shutil.copytree(folder, tmp_path / "alone"))
    (alone / "preprocessor_config.json").unlink()
    assert load_model_config(alone).vision is None
    assert VisionText.load(alone) is None
    text = pictures.prompt(np.random.default_rng(0), 30)
    driver = drive(alone)
    assert driver.generate(driver.add(text.ids), 5) == pictures.generate(text, 5)


def test_items_are_what_the_reader_makes(folder: Path) -> None:
    vision = VisionText.load(folder)
    assert vision is not None
    item = vision.item(ONE)
    assert (item.grid, item.length) == (GRID, ROWS)
    assert item_of(folder, ONE).length == ROWS
    assert vision.mismatch(item) is None
