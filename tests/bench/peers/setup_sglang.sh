#!/usr/bin/env bash
# Installs SGLang's scheduler classes (not its kernels) into $PEERS/sglang (default ~/.cache/millstream-peers/sglang),
# on CPU PyTorch: enough to import its radix caches and its schedule policy. About 2.9 GB.
set -euo pipefail
PEERS=${PEERS:-$HOME/.cache/millstream-peers}
PYTHON=${PYTHON:-python3}
mkdir -p "$PEERS" && cd "$PEERS"

if ! ls -d sglang/lib/python3*/site-packages/sglang-0.5.23.dist-info >/dev/null 2>&1; then
  "$PYTHON" -m venv sglang
  pip=(sglang/bin/pip install -q)
  "${pip[@]}" torch==2.13.0
  "${pip[@]}" aiohttp blobfile==3.0.0 compressed-tensors==0.18.0 dill einops fastapi gguf interegular ipython msgspec \
    numba==0.65.1 numpy openai==2.8.0 orjson packaging partial_json_parser pillow prometheus-client psutil pybase64 \
    pydantic python-multipart pyzmq requests scipy sentencepiece setproctitle torch==2.13.0 tqdm transformers==5.19.0 \
    triton uvicorn uvloop xxhash zstandard
  # Imported by a model config that nothing here uses. Later versions do not import beside a CPU torch: their compiled
  # part is linked to CUDA's.
  "${pip[@]}" --no-deps torchvision==0.15.2
  "${pip[@]}" --no-deps apache-tvm-ffi==0.1.11 sglang==0.5.23
fi
sglang/bin/python -W ignore -c "
import sglang.srt.managers.schedule_policy
import sglang.srt.mem_cache.radix_cache
import sglang.srt.mem_cache.rust_tree_core.adapter
import sglang.srt.mem_cache.unified_radix_cache"
echo "sglang ready in $PEERS/sglang"
