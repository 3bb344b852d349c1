"""Compare: several systems serve the same jobs, in turn, again and again; each is held against plain decoding.

It knows the order of measurement, warm-up and the reference. What a system is and how it is printed
is for others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from evals import memory
from evals.equality import Judge
from evals.load import Job, Outcome, System
from evals.runs import PLAIN, Run, stats_of, times_of
from evals.workloads import Prompt

WARM_UP_TOKENS = 8


class Comparison:
    """Measures systems on workloads, plain first and as the reference.

    systems   the first must be plain decoding
    judge     decides which differences floating point allows
    decode    ids to text, to compare a server that gives no ids
    save      is given every run as soon as it is over
    done      runs of an earlier, interrupted command; they are not repeated
    """

    def __init__(
        self,
        systems: Sequence[System],
        judge: Judge,
        decode: Callable[[Sequence[int]], str],
        save: Callable[[Run], None],
        done: Sequence[Run] = (),
    ) -> None:
        if not systems or systems[0].label != PLAIN:
            raise ValueError("the first system must be plain decoding; the others are measured against it")
        self.systems = list(systems)
        self.judge = judge
        self.decode = decode
        self.dtype = str(judge.dtype).removeprefix("torch.")
        self.save = save
        self.runs = list(done)
        self._done = {run.key for run in done}
        self._references: dict[tuple[str, int], list[list[int]]] = {}  # by workload and number of its jobs
        for run in done:
            if run.system == PLAIN:
                self._references.setdefault((run.workload, len(run.outputs)), run.outputs)

    def systems_at(self, concurrency: int) -> list[System]:
        """Those that can hold so many requests in flight."""
        return [s for s in self.systems if s.max_concurrency is None or concurrency <= s.max_concurrency]

    def measure(
        self,
        workload: str,
        jobs: Sequence[Job],
        concurrency: int,
        repeats: range,
        bar: tqdm[Any],
    ) -> None:
        """Run every system on one workload, these repeats, in an order that rotates from one to the next.

        Neighbours in time then meet the same machine, and no system always comes first.
        """
        systems = self.systems_at(concurrency)
        for system in systems:
            if any((workload, concurrency, system.label, repeat) not in self._done for repeat in repeats):
                system.run(warm_up_jobs(jobs, concurrency), concurrency)
        for repeat in repeats:
            shift = repeat % len(systems) if (workload, len(jobs)) in self._references else 0
            for system in systems[shift:] + systems[:shift]:
                if (workload, concurrency, system.label, repeat) not in self._done:
                    bar.set_postfix_str(f"{workload} c={concurrency} {system.label}")
                    self._run(system, workload, jobs, concurrency, repeat)
                bar.update()

    def _run(self, system: System, workload: str, jobs: Sequence[Job], concurrency: int, repeat: int) -> None:
        before, steps_before = system.work()
        memory.forget_peak()
        outcomes = system.run(jobs, concurrency)
        after, steps_after = system.work()
        times = times_of(outcomes)
        reference = self._references.setdefault((workload, len(jobs)), times["outputs"])
        run = Run(
            workload=workload,
            concurrency=concurrency,
            system=system.label,
            repeat=repeat,
            stats=stats_of(outcomes),
            stages={stage: after[stage] - before[stage] for stage in after},
            num_steps=steps_after - steps_before,
            steps=system.steps(),
            peak_bytes=None if any(o.text is not None for o in outcomes) else memory.peak_bytes(),
            dtype=self.dtype,
            **self._judgement(jobs, reference, outcomes),
            **times,
        )
        self.runs.append(run)
        self._done.add(run.key)
        self.save(run)

    def _judgement(
        self, jobs: Sequence[Job], reference: Sequence[Sequence[int]], outcomes: Sequence[Outcome]
    ) -> dict[str, Any]:
        """Token ids are held against the reference; a server that gives only text is compared by its text."""
        if any(outcome.text is not None for outcome in outcomes):
            texts = [self.decode(ids) for ids in reference]
            return {"forks": [], "same_texts": sum(o.text == t for o, t in zip(outcomes, texts, strict=True))}
        return {"forks": self.judge.forks(jobs, reference, [o.token_ids for o in outcomes])}


def warm_up_jobs(jobs: Sequence[Job], concurrency: int) -> list[Job]:
    """As many jobs as will be in flight, of the same lengths, whose prompts are not those measured."""
    made = []
    for index in range(min(concurrency, len(jobs))):
        job = jobs[index]
        made.append(
            replace(
                job,
                prompt=Prompt(f"Warm-up {index}. {job.prompt.text}", "warm-up", job.prompt.is_raw),
                token_ids=tuple(reversed(job.token_ids)),
                max_tokens=min(WARM_UP_TOKENS, job.max_tokens),
            )
        )
    return made
