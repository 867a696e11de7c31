"""Starting from the parameters of another run: fine-tuning."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from jaxpar.errors import ConfigError
from jaxpar.runtime.checkpoints import Checkpoints
from jaxpar.runtime.run_folder import RunFolder

FIELD = "train.init_from"


class Pretrained:
    """The parameters in a run folder (its newest checkpoint) or in one ``.../checkpoints/step_N``, on any mesh.

    Raises, before any array is read, ConfigError where there are none, and JaxparError naming the first leaf that is
    missing or of another shape than ``abstract_params``, with both shapes.
    """

    def __init__(self, origin: str, abstract_params: Any):
        path = Path(origin).expanduser().absolute()
        named = re.fullmatch(r"step_(0|[1-9]\d*)", path.name)
        folder = path.parent if named else path / "checkpoints"
        self._checkpoints = Checkpoints(folder)
        step = int(named[1]) if named else self._checkpoints.latest()
        if step is None or not folder.is_dir():
            legal = "a run folder, or its checkpoints/step_N"
            raise ConfigError(FIELD, origin, "holds no complete checkpoint", legal)
        self._step, self._abstract = step, abstract_params
        self.directory, self._run = folder / f"step_{step}", RunFolder(folder.parent)
        self._checkpoints.check(step, abstract_params, only="params")

    def load(self) -> Any:
        """The parameters, with the shardings that were asked for."""
        return self._checkpoints.restore(self._step, self._abstract, only="params")

    def hand_on(self, run: RunFolder) -> None:
        """Copy what the run remembers of the Hugging Face model that it began with, if it did, to the new run."""
        if self._run.huggingface.is_dir():
            shutil.copytree(self._run.huggingface, run.huggingface, dirs_exist_ok=True)
