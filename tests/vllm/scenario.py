"""What vLLM answers, in a process of its own: ``python -m tests.vllm.scenario RUNNER ASKED ANSWERED``.

vLLM reads its environment when it is imported, and keeps threads; the tests look at what it wrote.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "kv_cache_memory_bytes": 32 << 20,
}


def choose_runner(runner):
    """Make vLLM take its first model runner, or its second, which on a CPU takes a Triton that is interpreted."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # Threads that wait for each other take minutes where the cores are busy.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    if runner == "v1":
        return
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    class Driver:
        @staticmethod
        def is_active():
            return True

    backends["cpu"] = SimpleNamespace(driver=Driver, compiler=None)


def sampling(asked):
    from vllm import SamplingParams

    extra = {"expert": asked["expert"]} if "expert" in asked else None
    scored = {"prompt_logprobs": 0} if asked.get("score") else {}
    return SamplingParams(
        temperature=0, max_tokens=asked["new"], logprobs=0, ignore_eos=True, extra_args=extra, **scored
    )


def answer(llm, batch):
    """Run one batch: what was generated, how likely it was, and how many tokens of the prompt came from the cache."""
    prompts = [{"prompt_token_ids": a["ids"]} | ({"cache_salt": a["salt"]} if "salt" in a else {}) for a in batch]
    found = []
    for asked, out in zip(batch, llm.generate(prompts, [sampling(a) for a in batch], use_tqdm=False), strict=True):
        said = out.outputs[0]
        likely = [step[token].logprob for step, token in zip(said.logprobs or [], said.token_ids, strict=True)]
        scored = [
            step[token].logprob for step, token in zip((out.prompt_logprobs or [])[1:], asked["ids"][1:], strict=False)
        ]
        found.append(
            {
                "tokens": list(said.token_ids),
                "logprobs": likely,
                "prompt_logprobs": scored,
                "cached": out.num_cached_tokens,
                "finish": said.finish_reason,
            }
        )
    return found


def step(llm, asked):
    """One thing to do: a batch, or something done to the engine first."""
    from vllm.exceptions import VLLMValidationError

    from freemoe.core.errors import DataError
    from freemoe.serve.vllm import requests, scheduler

    if asked.get("do") == "no salt":
        scheduler.salt_of = lambda name, given: given
        llm.reset_prefix_cache()
    elif asked.get("do") == "salt":
        scheduler.salt_of = requests.salt_of
        llm.reset_prefix_cache()
    elif asked.get("do") == "offer":
        requests.offered.add(asked["name"])
    elif asked.get("do") == "fail":
        try:
            answer(llm, asked["batch"])
        except (VLLMValidationError, DataError) as error:
            return str(error)
        return None
    else:
        return answer(llm, asked["batch"])
    return None


def main(runner, asked, answered):
    """Do what is asked of several models, one after the other; each is let go of before the next."""
    choose_runner(runner)
    import gc

    from vllm.platforms import current_platform

    from freemoe.serve.vllm.settings import llm_arguments
    from vllm import LLM

    answers, told = [], json.loads(asked.read_text())
    for folder in told["folders"]:
        llm = LLM(**{**llm_arguments(folder, told["base"]), **SMALL})
        assert llm.llm_engine.vllm_config.use_v2_model_runner == (runner == "v2")
        answers.append([step(llm, one) for one in told["steps"]])
        del llm
        gc.collect()
        # Done once; a second time it looks at every module, and stumbles over those of numba.
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    answered.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
