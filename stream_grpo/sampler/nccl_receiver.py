"""The worker's side of `weights.transfer = "nccl"`: vLLM's own receiver, in one call.

vLLM loads it in the workers of such a run alone. Not yet run on a GPU.
"""

from __future__ import annotations

import torch
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class NcclReceiver(NCCLWeightTransferEngine):  # type: ignore[misc]
    """As `WeightReceiver`: the model is whole before and after `receive_weights`, and a failure is kept in `error`."""

    error: str | None = None

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        """Leave the group before, and join."""
        self.shutdown()
        super().init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        """Nothing: see the class."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Load all tensors into this worker's model, of which it takes its share."""
        self.error = None
        try:
            with torch.no_grad():
                initialize_layerwise_reload(self.model)
                try:
                    super().receive_weights(update_info)
                finally:
                    finalize_layerwise_reload(self.model, self.model_config)
        except Exception as error:
            self.error = repr(error)

    def finish_weight_update(self) -> None:
        """Nothing: see the class."""
