"""The law under random operations: the state machine of kv_machine.py on tiny models and the demo.

A round is a few programs of PROGRAM steps on one model, in one KV format, with one team of engines;
round i uses Hypothesis' seed i, and i chooses the model, format and team too. The rounds start at
MINFER_SEED (1) and go on until MINFER_STEPS steps have been made: 2,000, or 200,000 with MINFER_SOAK
(tools/test --soak). A round that fails prints its number and the shortest program that fails;
MINFER_SEED=<the number> MINFER_STEPS=1 makes that round alone.
"""

import os
import time
from dataclasses import dataclass

import pytest
import tinymodels
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from kv_machine import N_SEQ, RULES, SEEN, Setup, machine_of
from kv_model import POS_MAX
from replay import Replay

import minfer

SOAK = os.environ.get("MINFER_SOAK", "") not in ("", "0")
STEPS = int(os.environ.get("MINFER_STEPS", 200_000 if SOAK else 2_000))
FIRST_SEED = int(os.environ.get("MINFER_SEED", 1))
PROGRAM, PROGRAMS = 44, 4  # steps of a program, programs of a round

BEST = minfer.isas()[0]
SECOND = minfer.isas()[1] if len(minfer.isas()) > 2 else "scalar"
TEAMS = [  # (isa, threads) of the engines that run in lockstep; the replay uses BEST and 1
    ((BEST, 2), (SECOND, 1)),
    ((SECOND, 3), (BEST, 1)),
    ((BEST, 2), ("scalar", 1)),
]


def readable(cache_type):
    try:
        return bool(minfer.resolve_format(cache_type))
    except minfer.UnsupportedError:
        return False


FORMATS = [cache_type for cache_type in ("f32", "f16", "q8_0") if readable(cache_type)]


@dataclass(frozen=True)
class Model:
    """A tiny model and the sizes of its engines, chosen so that kv_judge.py can judge."""

    name: str
    arch: str
    overrides: dict
    n_ctx: int = 150
    n_batches: tuple = (16, 16)  # of the two engines
    pos_end: int = POS_MAX


# A window of 8 and 4 sequences: a whole sliding arena has 80 cells, less than the full one's 150, so
# rows are evicted. Where it is capped (n_ctx = 68), nothing is evicted, and n_batch may differ.
YARN = {"rope_scaling": "yarn", "rope_attn_factor": 0.8}
LONG = {"rope_scaling": "longrope", "rope_attn_factor": 1.2}
MODELS = [
    Model("gemma3", "gemma3", {}),
    Model("llama-yarn", "llama", YARN, n_batches=(16, 5)),
    Model("phi3-window", "phi3", {"window": 8}),  # all layers windowed, and partial rope
    Model("gemma2", "gemma2", {}),
    Model("llama-freqs", "llama", {"rope_freqs": True}, n_batches=(7, 32)),
    Model("gemma3-capped", "gemma3", {}, n_ctx=68, n_batches=(16, 5)),
    Model("phi3-long", "phi3", LONG | {"rope_original_ctx": 64}, n_batches=(16, 9)),
    Model("mistral", "mistral", {}),
    Model("gemma3-linear", "gemma3", {"rope_scaling": "linear", "rope_factor": 8.0}),
    Model("phi3-short", "phi3", LONG | {"rope_original_ctx": 512}, pos_end=512),
    Model("llama", "llama", {}, n_batches=(5, 16)),
]


class Tiny(Setup):
    def __init__(self, model, cache_type, team, folder):
        self.model, self.cache_type, self.team = model, cache_type, team
        self.pos_end = model.pos_end
        packed = cache_type == "q8_0"  # which is in blocks of 32
        self.path = folder / f"{model.name}{'-packed' if packed else ''}.gguf"
        if not self.path.exists():
            overrides = {"head_dim": 32} if packed else {}
            tinymodels.write(self.path, model.arch, **overrides, **model.overrides)
        # A longrope model takes its factors by n_ctx: the replay's is on the same side.
        self.n_rows = 512 if model.pos_end < POS_MAX else 700

    def make(self):
        engines = [
            minfer.load(
                self.path, n_ctx=self.model.n_ctx, n_seq=N_SEQ, n_batch=n_batch,
                isa=isa, threads=threads, cache_type=self.cache_type,
            )
            for (isa, threads), n_batch in zip(self.team, self.model.n_batches, strict=True)
        ]  # fmt: skip
        options = dict(isa=BEST, threads=1, cache_type=self.cache_type)
        return engines, Replay(self.path, self.n_rows, **options)


# Nothing but the seed decides what is drawn, and slowness is no failure.
PLAIN = settings(
    deadline=None,
    database=None,
    derandomize=False,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def run(setup, number, n_steps, n_programs):
    run_state_machine_as_test(
        seed(number)(machine_of(setup)),
        settings=settings(PLAIN, max_examples=n_programs, stateful_step_count=n_steps),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("machine")


# How often each call, refusal and state must have occurred in 2,000 steps; a soak, which has more
# of everything, must reach the same rates or half of them. Seeds are fixed but what they draw is
# Hypothesis' affair, so the rounds go on for a while if a rare one is missing.
FLOORS = {
    "append": 150, "batch": 15, "padded": 8, "rows that are all pads": 5, "fill": 80,
    "share": 80, "chain": 20, "fork and edit": 30, "free": 80,
    "trim": 40, "trim to the limit": 8, "trim past the limit": 8, "rm": 40, "shift": 120,
    "reserve": 5, "reserve with defrag": 5, "probe hold": 20, "defrag": 25, "rows moved": 300,
    "append: KvFullError": 20, "batch: KvFullError": 2, "padded: KvFullError": 1,
    "append: KvRangeError": 1, "batch: KvRangeError": 1,
    "share: ArgumentError": 3, "share: KvNotEmptyError": 5, "share: KvGoneError": 1,
    "trim: ArgumentError": 10, "trim: KvGoneError": 1,
    "rm: ArgumentError": 5, "rm: KvFullError": 1, "rm: KvGoneError": 1,
    "shift: KvRangeError": 10, "shift: KvCollidesError": 1, "shift: KvGapsError": 1,
    "shift: KvFullError": 1,
    "reserve: KvFullError": 2, "reserve with defrag: KvFullError": 2, "defrag: KvFullError": 3,
    "unknown sequence": 10,
    "trim of a sequence that shares": 5, "rm of a sequence that shares": 5,
    "shift of a sequence that shares": 20, "rm among gaps": 2, "shift among gaps": 50,
    "steps with shared cells": 150, "steps with stale rows": 150,
    "steps with several free runs": 200, "sequences in several spans": 300,
    "sequences with gaps": 100,
    "rows compared": 1500, "next logits compared": 3000, "afresh": 100,
}  # fmt: skip


def missing():
    scale = max(1, STEPS / 4000) if STEPS >= 2_000 else 0
    return {name: SEEN[name] for name, floor in FLOORS.items() if SEEN[name] < floor * scale}


def test_machine(folder):
    SEEN.clear()
    start, number = time.monotonic(), FIRST_SEED
    while SEEN["steps"] < STEPS or (missing() and SEEN["steps"] < 5 * STEPS):
        model = MODELS[number % len(MODELS)]
        team = TEAMS[number // len(FORMATS) % len(TEAMS)]
        cache_type = FORMATS[number % len(FORMATS)]
        done, seconds = SEEN["steps"], time.monotonic() - start
        print(f"{done} steps, {seconds:.0f} s; seed {number}: {model.name} {cache_type} {team}")
        run(Tiny(model, cache_type, team, folder), number, PROGRAM, PROGRAMS)
        number += 1
    for name in sorted(SEEN):
        print(f"{SEEN[name]:9} {name}")
    assert not missing()


class Demo(Setup):
    """The real model: a prompt almost as long as its window of 512, so that growth crosses it."""

    n_prompt, afresh_every, max_events, max_edits = 500, 0, 2000, 8

    def __init__(self, path):
        self.engines = [
            minfer.load(path, n_ctx=640, n_seq=N_SEQ, n_batch=64, isa=isa, threads=threads)
            for isa, threads in ((BEST, 2), (SECOND, 1))
            if isa != "scalar"
        ]
        self.replay = Replay(path, 700, n_live=2, lead=480, isa=BEST, threads=2)

    def make(self):
        for engine in self.engines:
            for s in range(N_SEQ):
                engine.kv.free(s)
                engine.kv.reserve(s, 0)
        return self.engines, self.replay

    def done(self, engines, replay):
        pass

    def close(self):
        for engine in self.engines:
            engine.close()
        self.replay.close()


DEMO_PROGRAMS, DEMO_STEPS = 2, 16


def test_demo(demo_path):
    """A few dozen steps on the real model. All rules are equally likely: leaving some out in each
    program, as Hypothesis does, pays with more programs only."""
    SEEN.clear()
    demo = Demo(demo_path)
    start = time.monotonic()
    # Hypothesis begins with a program of the first name alone: one that is soon done.
    names = ["defrag", *sorted(RULES.keys() - {"defrag"})]

    @seed(FIRST_SEED)
    @settings(PLAIN, max_examples=1 + DEMO_PROGRAMS, phases=[Phase.generate])
    @given(st.data())
    def program(data):
        machine = machine_of(demo)()
        for _ in range(DEMO_STEPS):
            function, strategies = RULES[data.draw(st.sampled_from(names))]
            arguments = {name: data.draw(strategy) for name, strategy in strategies.items()}
            print(f"{time.monotonic() - start:.0f} s: {function.__name__} {arguments}")
            function(machine, **arguments)
            machine.the_law()
        machine.teardown()

    try:
        program()
        longest = demo.replay.root  # the prompt, and what came after it
        while longest.children and longest.depth < 520:
            longest = max(longest.children.values(), key=lambda node: node.event[0] == "append")
        demo.replay.afresh(longest)
    finally:
        demo.close()
    for name in sorted(SEEN):
        print(f"{SEEN[name]:9} {name}")
    print(f"{time.monotonic() - start:.0f} s")
    assert SEEN["steps"] >= DEMO_STEPS * DEMO_PROGRAMS <= SEEN["next logits compared"]
    assert SEEN["longest sequence"] > 512
