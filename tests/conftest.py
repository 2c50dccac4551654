"""What all tests share: golden files, the tiers, the count of skipped tests, and what keeps a run short."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

# Workers, and the processes that tests start, find compiled modules (pytest's rewritten ones too), whatever the shell
# says.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# One worker for each core is enough: the threads of NumPy's and of XGBoost's libraries would only wait for one another.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

os.environ["DNNC_STRICT"] = (
    "1"  # a kernel that needs a lesser schedule than the first choice is a mistake of the compiler
)

SKIPS_ALLOWED = 0  # may only fall; a test that cannot run somewhere belongs to a tier (slow, gpu) instead

# Of tests with many cases, and of files, that take long together, the fast tier runs every n-th; the slow tier runs the
# others.
THINNED = {
    "backends/llvm/test_emit.py": 3,
    "backends/llvm/test_build.py": 3,
    "backends/llvm/test_check.py": 6,
    "backends/test_pool.py": 2,
    "test_docs.py::test_blocks_run": 3,
    "frontends/onnx/ops/test_dynamic.py": 12,
    "frontends/onnx/microsoft/test_fused.py": 4,
    "frontends/onnx/ml/test_linear.py": 10,
    "frontends/onnx/ops/test_vision.py": 6,
    "frontends/onnx/test_random.py": 2,
    "test_architecture.py::test_no_table_of_shapes": 2,
    "test_examples.py": 4,
    "passes/test_base.py::test_large_graphs_take_little_time": 2,
    "compiler/test_cli_tune.py::test_fusion_in_the_table_as_data_and_in_the_log": 2,
    "compiler/test_driver.py::test_passes_take_linear_time": 2,
    "passes/analysis/test_rows.py::test_random_chains": 2,
    "compiler/array/test_device_arrays.py": 5,
    "compiler/array/test_custom.py": 4,
    "passes/analysis/test_rows.py": 4,
    "compiler/test_bound_fuzz.py": 4,
    "frontends/trace/test_sizes.py": 3,
    "passes/test_small_integers.py": 3,
    "compiler/array/test_elementwise.py": 7,
    "compiler/array/test_linalg.py": 5,
    "compiler/array/test_manipulation.py": 4,
    "compiler/array/test_reductions.py": 9,
    "compiler/export/test_ops.py::test_reads_back": 5,
    "compiler/export/test_ops.py::test_runs_elsewhere": 5,
    "compiler/export/test_graphs.py::test_random_graphs": 4,
    "compiler/test_parameters.py::test_replaced_and_changed": 3,
    "compiler/test_parameters.py::test_on_a_device": 3,
    "compiler/test_device_parameters.py::test_what_is_packed_and_what_is_not": 4,
    "compiler/test_schedules.py": 3,
    "frontends/trace/test_vmap.py": 3,
    "compiler/test_donation.py::test_memory_and_numbers": 4,
    "compiler/artifact/test_writer.py": 7,
    "frontends/torch/test_compile.py": 16,
    "frontends/torch/test_modules.py": 17,
    "frontends/torch/test_operators.py": 16,
    "compiler/tools/test_bench.py": 8,
    "compiler/test_calls.py": 6,
    "compiler/test_cli.py": 3,
    "backends/llvm/test_shapes.py": 6,
    "models/test_geometry.py": 3,
    "compiler/tools/test_bisect.py": 6,
    "compiler/test_numerics.py": 5,
    "compiler/test_staged.py": 6,
    "compiler/test_dynamic.py": 6,
    "compiler/test_device.py": 5,
    "compiler/test_fuzz.py": 3,
    "compiler/test_mutate.py": 3,
    "compiler/test_executable.py": 4,
    "compiler/tools/test_profile.py": 5,
    "backends/cuda/test_attention.py": 8,
    "backends/cuda/test_contractions.py": 8,
    "backends/cuda/test_recurrence.py": 20,
    "backends/llvm/test_contraction_choice.py": 4,
    "passes/schedule/test_random_schedules.py": 2,
    "passes/schedule/test_hoist_invariants.py": 3,
    "backends/cuda/test_generic.py": 7,
    "backends/cuda/test_wgmma.py": 4,
    "backends/cuda/test_gemv_norm.py": 4,
    "backends/cuda/test_emit.py": 2,
    "backends/cuda/test_spaces.py": 9,
    "backends/llvm/test_spaces.py": 8,
    "autotune/runners/test_measure.py": 3,
    "autotune/search/test_search.py": 3,
    "autotune/search/test_variants.py": 3,
    "compiler/test_libraries.py": 5,
    "compiler/test_device_cli.py": 3,
    "compiler/test_cli_artifacts.py": 3,
    "passes/planning/test_fusion_variants.py": 2,
    "autotune/log/test_file.py": 3,
    "autotune/log/test_replay.py": 3,
    "autotune/model/test_features.py": 2,
    "compiler/test_tune_session.py": 3,
    "compiler/test_cli_log.py": 3,
    "backends/llvm/test_winograd.py": 5,
    "backends/llvm/test_windows.py": 12,
    "backends/llvm/test_maps.py": 8,
    "passes/schedule/test_transposition.py": 2,
    "passes/schedule/test_index_set_splitting.py": 2,
    "backends/test_compile.py": 2,
    "passes/planning/test_memory_plan.py": 2,
    "passes/rewrites/test_layout.py": 2,
    "passes/planning/test_fuse.py": 4,
    "passes/rewrites/test_precision.py": 3,
    "passes/rewrites/test_channels_last.py": 2,
    "passes/schedule/test_scan.py": 4,
    "passes/schedule/test_block_reduce.py": 3,
    "passes/planning/test_program.py::test_symbolic_sizes_that_are_hard_to_schedule": 5,
    "ir/test_expr.py": 3,
    "ir/ops/test_special.py": 3,
    "models/test_nets.py": 4,
    "models/test_control.py": 3,
    "backends/llvm/test_check.py::test_sizes_that_a_check_makes_up_suit_constant_indices": 8,
    "backends/llvm/test_values.py": 3,
    "compiler/test_precision.py": 2,
    "backends/llvm/test_ops.py::test_sample": 12,
    "backends/llvm/test_ops.py::test_other_cpus": 12,
    "backends/llvm/test_ops.py::test_the_gate_passes_what_is_right": 3,
    "backends/llvm/test_emit.py::test_scheduled_text_reads_back": 12,
    "backends/llvm/test_emit.py::test_register_tiles_become_registers": 4,
    "backends/llvm/test_shapes.py::test_every_tail": 3,
    "backends/llvm/test_shapes.py::test_every_row_length": 3,
    "backends/llvm/test_shapes.py::test_reductions_over_any_axes": 3,
    "backends/llvm/test_shapes.py::test_transposed_tiles": 3,
    "backends/llvm/test_shapes.py::test_conv_sizes": 3,
    "backends/llvm/test_values.py::test_unary_floats": 3,
    "backends/llvm/test_values.py::test_binary_integers": 3,
    "backends/llvm/test_values.py::test_casts": 3,
    "backends/llvm/test_values.py::test_binary_floats": 3,
    "backends/llvm/test_shapes.py::test_symbolic_dims": 3,
    "backends/llvm/test_check.py::test_planted_bugs_are_caught": 3,
    "backends/test_pool.py::test_barrier_separates_the_rounds": 3,
    "compiler/test_cli.py::test_failures_are_short_and_have_their_exit_code": 3,
    "frontends/onnx/ops/test_strings.py::test_ngrams": 6,
    "frontends/onnx/ops/test_sort.py::test_top_k": 4,
    "frontends/onnx/ops/test_vision.py::test_deform_conv": 4,
    "frontends/onnx/ops/test_vision.py::test_det": 4,
    "passes/planning/test_fuse.py::test_plan_and_numbers": 3,
    "passes/analysis/test_alias.py::test_aliases_and_numbers": 3,
    "passes/planning/test_memory_plan.py::test_nothing_is_overwritten_while_it_is_needed": 2,
    "compiler/test_precision.py::test_a_float32_model_in_half": 4,
    "compiler/test_precision.py::test_models_that_are_half": 4,
    "compiler/test_precision.py::test_verify_model_has_the_reduced_contract": 2,
    "frontends/onnx/microsoft/test_fused.py::test_against_onnx_runtime": 5,
    "frontends/onnx/ops/test_sort.py::test_top_k_at_every_opset": 4,
    "ir/ops/test_records.py::test_type_rule_is_the_reference": 6,
    "ir/ops/test_records.py::test_float64_stays_float64": 6,
    "ir/ops/test_records.py::test_other_ranks_are_refused_or_mean_something": 12,
    "ir/ops/test_records.py::test_tensor_expression_is_the_reference": 6,
    "ir/ops/test_records.py::test_sampled_reference_is_the_reference": 6,
    "ir/ops/test_records.py::test_flops_are_a_positive_number": 6,
    "ir/ops/test_records.py::test_one_node_graph_interprets": 6,
    "models/test_control.py::test_numbers": 2,
    "models/test_nets.py::test_levels_and_threads": 3,
    "models/test_nets.py::test_one_program_for_all_batches": 3,
}

# Of these, which took half of the slow tier, it runs every n-th; `make thorough` runs the others.
SAMPLED = {
    "backends/cuda/test_contractions.py::test_every_shape": 2,
    "backends/cuda/test_generic.py::test_sample": 2,
    "backends/cuda/test_generic.py::test_shapes": 2,
    "backends/cuda/test_samples.py::test_scheduled_kernels_compile": 3,
    "backends/llvm/test_emit.py::test_scheduled_text_reads_back": 2,
    "backends/llvm/test_ops.py::test_other_cpus": 2,
    "backends/llvm/test_ops.py::test_sample": 2,
    "backends/llvm/test_shapes.py": 2,
    "backends/llvm/test_spaces.py::test_any_choice_means_the_same": 2,
    "backends/llvm/test_windows.py::test_every_width": 2,
    "backends/llvm/test_windows.py::test_special_values_anywhere": 2,
    "compiler/test_bound_fuzz.py": 3,
    "compiler/test_device_donation.py::test_random_programs": 4,
    "compiler/test_fuzz.py::test_random_graphs": 3,
    "compiler/test_precision.py::test_random_graphs": 4,
    "compiler/test_schedules.py::test_a_nest_says_what_its_kernel_does": 2,
    "frontends/onnx/ops/test_dynamic.py": 2,
    "frontends/onnx/microsoft/test_fused.py::test_against_onnx_runtime": 2,
    "frontends/onnx/ml/test_linear.py": 2,
    "frontends/torch/test_operators.py::test_half": 4,
    "frontends/torch/test_operators.py::test_operator": 3,
    "models/test_geometry.py::test_random_geometry": 4,
    "models/test_nets.py::test_levels_and_threads": 2,
    "passes/analysis/test_rows.py::test_many_random_chains": 2,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write tests/golden anew instead of comparing with it"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`golden(text)` compares with tests/golden/<test module>/<test>.txt; `golden(text, "b")` is a second file of the
    same test.
    """
    path = Path(request.path)
    name = re.sub(r"[^\w.=-]+", "_", request.node.name).strip("_")
    folder = Path(__file__).parent / "golden" / path.relative_to(Path(__file__).parent).with_suffix("")

    def check(text: str, part: str = "") -> None:
        file = folder / f"{name}{'.' + part if part else ''}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"there is no {file}; `pytest --update-golden` writes it"
        assert text == file.read_text(), (
            f"differs from {file}; if that is meant, `pytest --update-golden` and read the diff"
        )

    return check


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collecting makes stays until the end: no garbage collection goes through it, neither meanwhile nor in the
    tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = thin(THINNED, [item for item in items if not is_marked(item, "slow")], pytest.mark.slow)
    missing |= thin(
        SAMPLED,
        [item for item in items if is_marked(item, "slow") and not is_marked(item, "thorough")],
        pytest.mark.thorough,
    )
    whole = False
    assert not missing or not whole, f"names of tests that there are not: {sorted(missing)}"


def is_marked(item: pytest.Item, mark: str) -> bool:
    return item.get_closest_marker(mark) is not None


def thin(rates: dict[str, int], items: list[pytest.Item], mark: pytest.MarkDecorator) -> set[str]:
    """Mark all but each n-th of the items whose test or file has a rate n. Names without an item."""
    seen: dict[str, int] = {}
    for item in items:
        test = item.nodeid.split("[")[0].removeprefix("tests/")
        for name in (test, test.split("::")[0]):
            if name in rates and not is_marked(item, mark.name):
                seen[name] = seen.get(name, -1) + 1
                if seen[name] % rates[name] != rates[name] // 2:
                    item.add_marker(mark)
    return rates.keys() - seen.keys()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped > SKIPS_ALLOWED and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = len(terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"skipped: {skipped}, allowed: {SKIPS_ALLOWED}")
