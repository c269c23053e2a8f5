"""Ask about an image on a cluster of encoder, prefill and decode nodes on this machine.

``python examples/image.py MODEL_FOLDER [more flags of kvbaton up]`` starts the cluster, makes a
small PNG, asks about it twice, prints how often the encoder node got it, and stops. The model must
support images. With `--min-encode-rows 0` the router gives each image to the encoder node, which
has the second one in its cache; without it, a node that had the image recently encodes it itself.
"""

import base64
import json
import re
import signal
import struct
import subprocess
import sys
import urllib.request
import zlib

COUNT = re.compile(r'kvbaton_router_items_total\{where="(\w+)"\} (\S+)')


def png(width: int, height: int) -> bytes:
    """A PNG with a gradient of red and green (PNG specification, third edition)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    rows = (
        b"\0" + bytes(v for x in range(width) for v in (255 * x // width, 255 * y // height, 64))
        for y in range(height)
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(rows))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def ask(url: str, model: str, image: bytes) -> str:
    """Ask the model about an image; return its answer."""
    parts = [
        {"type": "image_url", "image_url": {"url": to_data_url(image)}},
        {"type": "text", "text": "What is in this image?"},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 24}
    request = urllib.request.Request(
        f"{url}/chat/completions",
        json.dumps(body | {"temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
        return answer


def to_data_url(image: bytes) -> str:
    """Embed an image in the request; ``https://`` URLs would need ``--allowed-media-domains``."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def main(model: str, flags: list[str]) -> None:
    """Start the cluster, ask twice, print how often the encoder node got the image, and stop."""
    words = ["up", "--model", model, "--encode", "1", "--port", "0", "--min-encode-rows", "0"]
    command = [sys.executable, "-m", "kvbaton", *words, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cluster:
        try:
            assert cluster.stdout is not None
            ready = (line for line in cluster.stdout if line.startswith("ready: "))
            if not (line := next(ready, "")):
                sys.exit("the cluster ended before it was ready")
            url = line.removeprefix("ready: ").strip()
            for _ in range(2):
                print(repr(ask(url, model, png(320, 200))))
            with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as metrics:
                counts = dict(COUNT.findall(metrics.read().decode()))
            print(f"given to the encoder node: {float(counts['encoder']):g} times")
        finally:
            cluster.send_signal(signal.SIGINT)  # no effect if it has ended
            cluster.communicate()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
