"""Says before a download whether pip would fetch accelerator packages with torch, and how large they are."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request

ACCELERATOR = ("nvidia-", "cuda-", "triton", "pytorch-triton")
PAUSE_S = 5


def plan(requirements: str) -> list[dict]:
    """What pip would install for torch, from package metadata."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run", "--quiet",
                        "--report", report.name, "-r", requirements], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        return json.load(open(report.name, encoding="utf-8"))["install"]


def size_bytes(item: dict) -> int:
    """Size of one file, from the server's header; 0 when it does not tell."""
    url = item["download_info"]["url"]
    if not url.startswith("http"):
        return 0
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except OSError:
        return 0


def main(requirements: str) -> int:
    try:
        items = plan(requirements)
    except subprocess.CalledProcessError:
        return 0  # the installation itself will say what is wrong
    extra = [item for item in items if item["metadata"]["name"].startswith(ACCELERATOR)]
    if extra:
        total = sum(map(size_bytes, items))
        print(f"esgrpo: torch: this index serves the accelerator build, which brings {len(extra)} more packages "
              f"({total / 1e9:.1f} GB in all) that a CPU run does not use. To avoid them, interrupt now and set "
              f"ESGRPO_TORCH_INDEX to PyTorch's CPU package index. Going on in {PAUSE_S} s.", flush=True)
        time.sleep(PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
