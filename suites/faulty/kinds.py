"""Kinds of faults, of public reports and of our own axes: the check and the test that show each.

``docs/faults.md`` is written from this table, ``suites/test_faults.py`` holds it to what exists.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault."""

    name: str
    words: str
    """What goes wrong."""
    checks: str
    """The checks that are red, and what about a case shows it."""
    tests: tuple[str, ...] = ()
    """Tests that plant one: ``file.py::test``, below ``suites``."""
    reason: str = ""
    """Why it, or part of it, cannot be expressed here."""


def _kind(row: str, *tests: str, reason: str = "") -> Kind:
    name, words, checks = (part.strip() for part in row.split("|"))
    return Kind(name=name, words=words, checks=checks, tests=tests, reason=reason)


MISTAKES = "meta/test_mistakes.py::test_a_mistake_is_red_and_named"
MUTANTS = "test_mutants.py::test_told_by_its_aimed_inputs"
DECISIONS = "test_checks.py::test_a_wrong_decision_is_red_and_named"
OWN = "test_own_memory.py::test_a_fault_in_memory_of_its_own_is_red"
COME = "test_inputs_as_they_come.py::test_a_kernel_that_misreads_its_inputs_is_red_and_named"
LEAKS = (
    "test_sequence_faults.py::test_what_a_kernel_keeps_is_named_with_the_call_that_it_comes_from"
)
WORKSPACE = (  # fmt: skip
    "test_sequence_faults.py::"
    "test_a_result_in_a_workspace_is_named_with_the_call_that_overwrites_it"
)
GRAPH = "test_replay_faults.py::test_what_a_graph_keeps_is_named"
WAITS = "test_replay_faults.py::test_a_wait_for_the_gpu_is_named_with_its_line"
COMPILED = "test_promises.py::test_what_is_compiled_while_serving_is_told"
WRAPS = "test_offsets.py::test_an_offset_that_wraps_is_red_and_named"
LAUNCHED_WRAP = "test_offsets.py::test_an_int32_offset_in_triton_is_out_of_bounds"
CONFIGURED = "test_config_faults.py::test_the_wrong_configuration_of_a_quantizer_is_named"
TILED = "test_config_faults.py::test_a_block_of_k_larger_than_the_group_is_found_in_a_gemm"
ROWS = "test_invariance_faults.py::test_a_row_that_depends_on_others_is_named"
VIRTUAL = "test_virtual_gpu_faults.py::test_a_fault_of_memory_is_the_cause"
RACE = "test_virtual_gpu_memory.py::test_two_programs_race_unless_both_load_or_both_are_atomic"
STRAY = "test_virtual_gpu_guards.py::test_an_access_outside_its_tensor_is_named"
ORDER = "test_virtual_gpu_guards.py::test_an_atomic_counts_in_every_order_but_hands_out_other_slots"
WORDS = "test_words.py::test_an_unwritten_row_is_called_one"

LITTLE = "no stage for the router yet: a stage begins with the ids and weights that it made"

REPORTED: tuple[Kind, ...] = (
    _kind(
        "div-recip | division in another form than the recipe's | exact; values aimed, special",
        MUTANTS,
        DECISIONS,
    ),
    _kind(
        "double-round | a rounding more, less, or through a narrower type | exact; aimed",
        MUTANTS,
        MISTAKES,
    ),
    _kind(
        "approx-math | fast exp, tanh or sigmoid; another order of scales | exact; aimed",
        MUTANTS,
        MISTAKES,
    ),
    _kind(
        "amax-edge | zero, tiny, subnormal or huge maxima | exact, finite; special, wide, scales",
        MUTANTS,
    ),
    _kind("fp8-range | another largest code, a cast that does not saturate | exact", MISTAKES),
    _kind("amax-reduce | a maximum of the wrong elements | exact", MISTAKES),
    _kind(
        "ue8m0-rounding | a wrong exponent next to a power of two | exact; aimed", MUTANTS, MISTAKES
    ),
    _kind("ue8m0-payload | codes by another scale than the one stored | exact", MISTAKES),
    _kind(
        "ue8m0-edge-code | exponent bytes 0 and 254, bits of the mantissa in a packed word"
        " | exact; scales",
        COME,
        MISTAKES,
    ),
    _kind(
        "ue8m0-dispatch | the asked format of scales is lost on the way | exact; scale format",
        MISTAKES,
    ),
    _kind(
        "scale-layout | scales transposed, interleaved, or read with other strides | exact; layout",
        COME,
        MISTAKES,
    ),
    _kind("weight-layout | gate and up swapped or interleaved | exact", MISTAKES),
    _kind(
        "stride | rows with gaps read as if there were none | exact; strided, transposed, gaps",
        COME,
        "test_checks.py::test_a_kernel_that_reads_the_gaps_is_red",
    ),
    _kind(
        "tail-block | the last, partly filled block of N, K or groups | exact, write_set; widths",
        MISTAKES,
    ),
    _kind(
        "int32-offset | an offset that does not fit 32 bits | exact; far",
        WRAPS,
        LAUNCHED_WRAP,
    ),
    _kind(
        "align-sort | wrong slots, experts of blocks or counts | exact, rerun", MISTAKES, VIRTUAL
    ),
    _kind(
        "expert-count | an E that is no power of two, one past a block, 1024 and more | exact; E",
        MISTAKES,
    ),
    _kind("neg-id | -1 used as an index, or summed | exact; holes, nobody", MISTAKES),
    _kind(
        "ep-remap | global and local ids confused, foreign pairs computed | exact; ranks, holes",
        MISTAKES,
    ),
    _kind(
        "zero-token | no token, an expert or a rank without a pair | exact; M = 0, nobody", MISTAKES
    ),
    _kind(
        "uninit-scale-pad | padding of scales that nobody writes | write_set, rerun",
        "test_returns.py::test_padding_that_must_be_zero",
        OWN,
    ),
    _kind(
        "pad-nan | 0 * NaN or stale padding reaches live rows | exact, invariance; scales",
        ROWS,
        "test_inputs_as_they_come.py::test_padding_holds_nan_and_the_largest_number",
    ),
    _kind("unwritten-rows | rows that are never stored | write_set, exact", WORDS, OWN),
    _kind(
        "ws-alias | a workspace, an input and an output share memory | sequence, replay",
        WORKSPACE,
        "test_replay_faults.py::test_an_output_in_the_memory_of_an_input_is_told",
    ),
    _kind("graph-lifetime | a captured address is freed or moved | replay", GRAPH),
    _kind("graph-state | flags and counters of earlier calls | replay, sequence", GRAPH, LEAKS),
    _kind("router-nan | NaN logits make ids that are none | none", reason=LITTLE),
    _kind("router-math | wrong ids or weights from valid logits | none", reason=LITTLE),
    _kind(
        "route-scale | a routing weight missing, twice, or in another place | exact",
        MISTAKES,
        DECISIONS,
    ),
    _kind("topk-sum | the accumulator's type, the order of the sum | exact; k", MISTAKES, MUTANTS),
    _kind(
        "clamp-lost | the limit dropped, kept from before, or elsewhere | exact, sequence; clamp",
        MISTAKES,
        LEAKS,
    ),
    _kind(
        "shared-expert | a shared expert mis-scaled, dropped or double | none",
        reason="no stage has shared experts: `run_moe` takes routed ones",
    ),
    _kind(
        "atomic-order | sums in the order in which programs arrive | rerun in another order",
        ORDER,
        VIRTUAL,
    ),
    _kind("batch-variant | a row depends on the others | row_subset, invariance", ROWS),
    _kind(
        "race | two programs at one place, a barrier missing | rerun, races on the virtual GPU",
        RACE,
        VIRTUAL,
        reason="inside a program (cp.async, warps) only a GPU shows it, in repeated calls",
    ),
    _kind(
        "miscompile | a compiler or a configuration gives wrong values | exact; configurations",
        CONFIGURED,
        TILED,
        reason="the compiler is not ours to break: kernels are judged as compiled, on a GPU",
    ),
    _kind(
        "interpreter | a CPU interpreter differs from the chip | models of instructions",
        "test_virtual_gpu_guards.py::test_an_operation_without_a_model_raises_and_names_itself",
        "test_virtual_gpu_guards.py::test_uncertain_contractions_raise",
    ),
    _kind(
        "tactic-wrong | a bucket of M picks a wrong kernel | exact, row_subset; M",
        reason="a tactic inside a closed library is seen only where a shape picks it",
    ),
    _kind("tune-key | a cache whose key lacks a word of the call | sequence", LEAKS),
    _kind("jit-stall | compilation while serving | no_recompile", COMPILED),
    _kind("fusion-swap | a compiler fuses ops and rounds otherwise | exact", MUTANTS),
    _kind(
        "bad-reference | the reference has another chain of roundings | references",
        "test_refuted.py::test_wrong_recipe_is_refuted",
    ),
    _kind(
        "bad-tolerance | a tolerance hides or invents failures | every check: it is zero",
        "test_words.py::test_the_sign_of_a_code_counts",
    ),
    _kind(
        "bad-seed | inputs that cannot be made again | frozen inputs",
        "test_frozen_inputs.py::test_inputs_are_what_they_were",
        "meta/test_fuzz.py::test_a_seed_draws_the_same_cases",
    ),
)
"""The kinds of public reports."""

AXES: tuple[Kind, ...] = (
    _kind("m-bucket | some numbers of tokens alone: 3 and 4, past 128, no multiple of 8"
          " | exact, row_subset; M"),
    _kind("top-k | more than 8 or 16 experts a token | exact; k = 9, 22"),
    _kind("group-count | numbers of groups that are odd, or no multiple of 4 or 8"
          " | exact; H, I"),
    _kind("ragged | widths past the last whole 16 or 128 columns | exact; H, I"),
    _kind("duplicates | a token takes an expert twice | exact; repeated", MISTAKES),
    _kind("foreign-ids | ids of other ranks, and past the end | exact; holes", MISTAKES),
    _kind("empty-experts | experts without a pair | exact; routing"),
    _kind("ranks | the last rank, or one in the middle | exact; ranks"),
    _kind("one-expert | one expert takes every pair | exact; one, last"),
    _kind("nobody | no pair is the rank's | exact, write_set; nobody"),
    _kind("exponents | UE8M0 bytes 0 and 254 | exact; scales", COME),
    _kind("fp32-scales | subnormal, zero, huge and NaN fp32 scales | exact; scales", COME),
    _kind("scale-inputs | column-major and padded scales as inputs | exact; col, tma", COME),
    _kind("gaps | rows of inputs with gaps between them | exact; gaps, strided", COME),
    _kind("misaligned | inputs that start 2 to 16 bytes past an aligned address | exact; offset2",
          COME),
    _kind("own-memory | scratch unset, flags unset, bytes beside | rerun, write_set, exact", OWN,
          "test_own_memory_triton.py::test_a_launch_that_leaves_its_memory_ends_there"),
    _kind("sequence | what is kept from one call to another | sequence", LEAKS, WORKSPACE),
    _kind("replay | what a captured call keeps | replay", GRAPH, WAITS),
    _kind("invariance | rows that depend on the batch | invariance", ROWS),
    _kind("strays | accesses outside a tensor, reads of what nobody wrote | virtual GPU", STRAY,
          "test_virtual_gpu_memory.py::test_a_load_of_what_nobody_wrote_is_named", VIRTUAL),
    _kind("far | offsets past 2^31 | exact; far", WRAPS, LAUNCHED_WRAP,
          "test_offsets.py::test_rows_alone_differ_where_an_offset_wraps"),
    _kind("configurations | a configuration of an autotuned kernel differs | configs", CONFIGURED,
          TILED, "test_config_faults.py::"
          "test_the_wrong_configuration_of_a_swiglu_is_named_and_reproduced"),
    _kind("heuristics | what is chosen by M is wrong for one number of rows | exact; every size",
          "test_config_faults.py::test_heuristics_that_are_wrong_for_one_number_of_rows_are_found"),
)  # fmt: skip
"""The axes along which cases are drawn and calls are made."""

KINDS: dict[str, Kind] = {kind.name: kind for kind in (*REPORTED, *AXES)}
