"""What a process holds beside a model: the yardstick of tests that nothing is copied."""

import gc

import torch


def bytes_beside(model):
    """Bytes of all tensors alive whose memory is not the model's."""
    mine = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    alive = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and not found.is_meta:
            sparse = found.layout == torch.sparse_csr
            for part in (found.crow_indices(), found.col_indices(), found.values()) if sparse else (found,):
                storage = part.untyped_storage()
                if storage.data_ptr() not in mine:
                    alive[storage.data_ptr()] = storage.nbytes()
    return sum(alive.values())
