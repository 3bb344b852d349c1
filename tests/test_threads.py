"""Threads: the environment is prepared but never overruled, and a number asked for is used."""

from __future__ import annotations

import pytest
import torch

from specdec.config import EngineConfig, ModelConfig
from specdec.threads import default_threads, pick_threads, prepare_environment, use_threads


def test_what_is_said_in_the_environment_stays() -> None:
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    prepare_environment(environ)
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE", "TOKENIZERS_PARALLELISM": "false"}


def test_there_is_always_a_thread_and_never_more_than_the_quota() -> None:
    assert pick_threads(1, None, 0.2) == 1
    assert pick_threads(64, 32, None) == 32 and pick_threads(8, 8, 3.0) == 3
    assert default_threads() >= 1


def test_a_number_asked_for_is_used_and_none_only_lowers() -> None:
    before = torch.get_num_threads()
    try:
        assert use_threads(1) == torch.get_num_threads() == 1
        assert use_threads(None) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="num_threads is 0; it must be an integer from 1"):
        EngineConfig(target=ModelConfig(model="x"), num_threads=0)
