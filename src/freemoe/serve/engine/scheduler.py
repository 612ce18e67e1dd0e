"""Which sequences run now, and what becomes of each step's logits: continuous batching, on one thread.

A step first gives every running sequence its next token, then reads a bounded number of prompts' tokens: a long prompt is read
over several steps, and running sequences do not wait for its end.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from freemoe.serve.engine.choosing import gather_logprobs, nan_error, sample_batch
from freemoe.serve.engine.runner import BatchRow, ModelRunner
from freemoe.serve.engine.sequence import SequenceState
from freemoe.serve.metrics import ServerMetrics
from freemoe.serve.settings import EngineLimits


class BatchScheduler:
    """The sequences that wait and those that run."""

    def __init__(self, runner: ModelRunner, limits: EngineLimits, watch: ServerMetrics) -> None:
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []
        self._runner, self._limits, self._watch = runner, limits, watch
        self._numbers = itertools.count()

    @property
    def all_sequences(self) -> Iterable[SequenceState]:
        """Every sequence that has not ended."""
        return [*self.running, *self.waiting]

    def admit_waiting(self) -> None:
        """Let go of what nobody reads any more, and give free slots to those that wait longest."""
        for sequence in [s for s in self.running if s.outbox.is_closed]:
            self._release_sequence(sequence, "gone")
        for sequence in [s for s in self.waiting if s.outbox.is_closed]:
            self.waiting.remove(sequence)
            self._watch.record_sequence_end(sequence.ask.metrics_label, "gone", 0, 0)
        while self.waiting and len(self.running) < self._limits.batch:
            sequence = self.waiting[0]
            sequence.number = next(self._numbers)
            self._runner.add_sequence(sequence.number)
            # Not before: whatever fails, it is in one of the two.
            self.running.append(self.waiting.popleft())
            if sequence.finish_unread():
                self._release_sequence(sequence, "length")
        self.report_queue_sizes()

    def report_queue_sizes(self) -> None:
        """Say how many there are."""
        self._watch.running.set(len(self.running))
        self._watch.waiting.set(len(self.waiting))

    def step(self) -> None:
        """One token for each sequence that writes, then a part of the prompts of those that still read."""
        writing = [s for s in self.running if s.has_read]
        self._forward_rows(writing, [BatchRow(s.number, (s.written[-1],), s.ask.expert) for s in writing])
        reading, rows, left = [], [], self._limits.prefill
        for sequence in [s for s in self.running if not s.has_read]:
            # Pieces begin at fixed places, whatever else is read: sums over other pieces differ in their last bits.
            tokens = sequence.ask.prompt[sequence.fed : sequence.fed + self._limits.prefill]
            if len(tokens) > left:
                break
            reading.append(sequence)
            rows.append(BatchRow(sequence.number, tokens, sequence.ask.expert, sequence.required_logits(len(tokens))))
            left -= len(tokens)
        self._forward_rows(reading, rows)

    def fail_all(self, error: Exception) -> None:
        """End every sequence with an error; all readers know before anything else is done."""
        for sequence in self.all_sequences:
            sequence.fail_sequence(error)
            sequence.emit_end()
        waiting, self.waiting = self.waiting, deque()
        for sequence in list(self.running):
            self._release_sequence(sequence, "error")
        for sequence in waiting:
            self._watch.record_sequence_end(sequence.ask.metrics_label, "error", 0, 0)

    def _forward_rows(self, sequences: list[SequenceState], rows: Sequence[BatchRow]) -> None:
        """Run rows and hand on what they say; an error ends the sequences that it touches."""
        if not rows:
            return
        try:
            logits = self._runner.forward(rows)
            self._process_logits(sequences, rows, logits)
        except Exception as error:
            for sequence in sequences:
                if sequence in self.running:
                    sequence.fail_sequence(error)
                    self._release_sequence(sequence, "error")

    def _process_logits(
        self, sequences: list[SequenceState], rows: Sequence[BatchRow], logits: Sequence[Tensor]
    ) -> None:
        chosen: list[tuple[SequenceState, Tensor]] = []
        # All rows at once: one by one they would cost as much as the pass of a small model.
        odd = iter(torch.cat(list(logits)).isnan().any(-1).tolist())
        for sequence, row, found in zip(sequences, rows, logits, strict=True):
            if sum(next(odd) for _ in range(len(found))):
                sequence.fail_sequence(nan_error(found))
                self._release_sequence(sequence, "error")
                continue
            if sequence.advance_prompt(row, found):
                chosen.append((sequence, found[-1]))
            elif sequence.ended:
                self._release_sequence(sequence, sequence.ended)
        if not chosen:
            return
        last = torch.stack([found for _, found in chosen])
        tokens = sample_batch([sequence.chooser for sequence, _ in chosen], last)
        likely = gather_logprobs(last, tokens, [sequence.ask.logprobs for sequence, _ in chosen])
        for (sequence, _), token, how in zip(chosen, tokens, likely, strict=True):
            now = time.perf_counter()
            took = self._watch.next_token if sequence.written else self._watch.first_token
            took.labels(sequence.ask.metrics_label).observe(now - sequence.since)
            sequence.since = now
            sequence.append_token(token, *how)
            if sequence.ended:
                self._release_sequence(sequence, sequence.ended)

    def _release_sequence(self, sequence: SequenceState, how: str) -> None:
        self._watch.record_sequence_end(sequence.ask.metrics_label, how, sequence.fed, len(sequence.written))
        sequence.emit_end()
        self._runner.remove_sequence(sequence.number)
        self.running.remove(sequence)
