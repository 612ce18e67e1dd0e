"""Runs that were stopped go on from files, which are read to the host, on the accelerator that they began on."""

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from freemoe.training.mean import ParameterMean


def test_a_mean_goes_on_where_its_parameters_are(accelerator, tmp_path):
    parameters = {"p": nn.Parameter(torch.arange(5.0, device=accelerator))}
    first, second = ParameterMean(parameters, 1.0), ParameterMean(parameters, 1.0)
    first.update_mean()
    save_file(first.to_state(), tmp_path / "state.safetensors")
    second.load_state(load_file(tmp_path / "state.safetensors"))
    parameters["p"].data += 1
    for mean in (first, second):
        mean.update_mean()
    assert second.values["p"].device == parameters["p"].device
    assert torch.equal(second.values["p"], first.values["p"])
    assert not torch.equal(second.values["p"], parameters["p"])
