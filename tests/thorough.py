"""Tests that `make test-all` runs and `make test` leaves out: the dearest whose claim has a cheaper witness.

A number is how many of a test's cases `make test` keeps, spread evenly over its list; 0 leaves out all.
"""

from collections.abc import Iterator, Sequence

import pytest

THOROUGH = {
    # Real processes killed, stopped or asked to end; one of each kind of cause stays in.
    "test_checkpoint.py::test_saving_changes_nothing_and_leaves_the_last_two": 0,
    "test_checkpoint.py::test_a_whole_job_that_is_killed_while_it_saves_ends_as_one_left_alone": 0,
    "test_elastic_command.py::test_ranks_of_a_stage_share_out_samples_and_weights": 1,
    "test_elastic_multimodal.py::test_a_node_with_layers_of_several_modules_is_lost_and_nothing_changes": 1,
    "test_elastic_sharded.py::test_nodes_that_share_out_weights_die_leave_and_join": 0,
    "test_failures.py::test_frozen_process_is_named_when_the_others_have_waited_long_enough": 0,
    "test_preprocess_attacks.py::test_sockets_that_say_nothing_take_all_descriptors_for_a_while_only": 0,
    "test_stopped.py::test_a_stopped_producer_is_replaced": 0,
    "test_stopped.py::test_a_stopped_save_is_named": 0,
    "test_chaos.py::test_a_few_rounds_are_clean": 0,
    "test_checkpoint.py::test_a_run_over_batches_goes_on_at_its_batch": 0,
    "test_checkpoint.py::test_a_run_that_is_killed_while_it_saves_goes_on_to_the_last_bit": 0,
    "test_cli.py::test_a_killed_rank_ends_the_run_with_its_cause": 0,
    "test_elastic.py::test_chaos_leaves_the_losses_what_they_are": 0,
    "test_orphans.py::test_a_run_that_is_asked_to_end_says_how_far_it_came": 0,
    "test_orphans.py::test_nodes_of_a_killed_elastic_training_are_gone_with_their_folder": 0,
    "test_orphans.py::test_ranks_of_a_killed_launcher_are_gone": 0,
    "test_orphans.py::test_ranks_under_torchrun_that_are_asked_to_end_do_not_wait_for_each_other": 0,
    "test_soak.py::test_steps_of_a_run_are_sampled_and_recorded": 0,
    "test_stopped.py::test_a_stopped_rank_under_torchrun_is_killed_by_its_neighbours_and_named": 0,
    "test_torchrun.py::test_a_killed_rank_ends_all_and_is_named": 0,
    # Damaged input: a few of each reader's cases stay in.
    "test_fuzz.py::test_every_kind_of_finding_is_found": 0,
    "test_fuzz.py::test_the_command_prints_seed_and_counts": 0,
    "test_hostile_files.py::test_a_damaged_arrow_file_is_read_or_refused_and_never_crashes": 0,
    # Every family or degree trains as one process: some of each stay in.
    "test_context_parallel_attention.py::test_outputs_and_gradients_are_those_of_one_process": 4,
    "test_context_parallel_encoders.py::test_any_owners_and_packed_items": 1,
    "test_context_parallel_encoders.py::test_encoders_alone": 2,
    "test_context_parallel_step.py::test_four_ranks": 2,
    "test_context_parallel_step.py::test_frozen_parts": 2,
    "test_cross_attention_runs.py::test_depths_of_the_language_model": 1,
    "test_cross_attention_runs.py::test_frozen_parts": 1,
    "test_cross_attention_runs.py::test_strategies": 1,
    "test_layouts_grid.py::test_sample_trains_as_one_process": 1,
    "test_multimodal.py::test_masks_of_a_batch_reach_the_ranks": 1,
    "test_multimodal.py::test_other_encoders": 1,
    "test_multimodal_images.py::test_encoders_of_other_families": 1,
    "test_multimodal_images.py::test_qwen_reads_patches_and_grids": 1,
    "test_multimodal_status.py::test_an_optimizer_of_the_users_sees_the_same_steps": 0,
    "test_multimodal_status.py::test_parts_are_frozen_and_freed_between_steps": 0,
    "test_next_batches.py::test_planning_hides_behind_the_step": 0,
    "test_sim_sweep.py::test_equals_the_engine_on_random_plans": 4,
    "test_adapters_encoders.py::test_two_items_of_an_encoder_equal_transformers": 1,
    "test_attention_mask.py::test_words_and_tiles_say_what_the_fields_say": 4,
    "test_context_parallel_encoders.py::test_tokens_shrink_whoever_holds_them": 3,
    "test_context_parallel_step.py::test_two_ranks_in_a_pipeline_of_two_stages": 7,
    "test_cost_model.py::test_twice_the_tokens_never_take_less_time": 3,
    "test_emulate.py::test_every_bit_is_that_of_the_distributed_run": 1,
    "test_emulate.py::test_loss_gradients_and_weights_are_those_of_one_process_on_the_whole_batch": 3,
    "test_emulate_times.py::test_the_timeline_is_that_of_the_measured_actions": 1,
    "test_families.py::test_weights_are_those_of_transformers": 20,
    "test_key_exchange.py::test_two_ranks": 4,
    "test_layouts_parity.py::test_encoders_that_leave_while_the_llm_runs": 1,
    "test_layouts_parity.py::test_one_encoder": 3,
    "test_layouts_parity.py::test_one_encoder_on_the_same_ranks": 3,
    "test_multimodal.py::test_every_place_of_encoders": 2,
    "test_next_batches.py::test_every_step_is_that_of_one_process": 1,
    "test_parity.py::test_every_strategy": 5,
    "test_schedule_runs.py::test_encoders_on_ranks_of_their_own": 4,
    "test_schedule_runs.py::test_tied_and_replicated": 2,
    "test_search_bounds.py::test_the_counts_found_are_those_of_brute_force": 5,
    "test_sharded_optimizer.py::test_an_emulation_does_the_same": 0,
    "test_split_backward.py::test_one_pipeline": 3,
    "test_split_backward.py::test_other_layouts": 3,
    "test_tensor_parallel.py::test_every_decoder_over_two_ranks": 7,
    "test_tensor_parallel.py::test_every_encoder_over_two_ranks": 6,
    "test_tensor_parallel.py::test_layouts_around": 5,
    "test_nccl_manners.py::test_all_train_as_one_process": 1,
    # contracts/test_strategies_under_schedules.py plans and trains every strategy.
    "test_nccl_manners.py::test_every_strategy_is_there_at_two_numbers_of_ranks": 0,
    "test_nccl_manners.py::test_receives_posted_first_and_a_wait_for_the_device_hang": 0,
    "test_strategies_under_schedules.py::test_each_trains_as_one_process": 3,
    # Memory of running ranks against the account: one of each stays in.
    "test_row_memory.py::test_runs_that_were_published_fit": 1,
    "test_memory_families.py::test_every_rank_is_within_the_goal": 1,
    "test_memory_runs.py::test_measured_peak_is_at_most_the_predicted_one_and_near_it": 4,
    "test_peak_memory.py::test_the_account_holds_for_one_rank": 0,
    "test_tensor_sequence.py::test_no_rank_holds_more_than_predicted": 1,
    # Whole commands and studies whose parts are tested by themselves.
    "test_cli_run.py::test_training_goes_on_from_exported_weights": 0,
    "test_device_sheets.py::test_building_again_gives_the_shipped_bytes": 0,
    "test_emulate.py::test_the_command_says_emulated": 0,
    "test_fidelity.py::test_emulated_plans_run_on_every_core_at_once": 0,
    "test_fidelity.py::test_one_device_plays_all_ranks_of_the_whole_suite": 0,
    "test_figure11.py::test_two_orders_in_bfloat16_learn_alike": 0,
    "test_gpu_day.py::test_it_stops_between_cells_before_the_limit": 0,
    "test_microbench.py::test_one_process_measures_layers_and_executor_alone": 0,
    "test_microbench_alone.py::test_it_runs_without_the_rest_and_goes_on_where_it_was": 0,
    "test_run_devices.py::test_a_profile_of_another_device_is_one_line": 0,
    "test_runnable.py::test_what_is_refused_runs_with_one_thing_changed": 0,
    "test_tour.py::test_from_a_configuration_to_an_explained_plan_within_two_minutes": 0,
    "test_trace_formats.py::test_hta_finds_our_breakdown_and_overlap": 0,
    "test_cli.py::test_calibrate_measures_what_a_job_is_made_of": 0,
    "test_cli_run.py::test_steps_go_through_a_folder": 0,
    "test_doors_export.py::test_every_plan_is_said_or_refused_for_a_reason": 0,
    "test_explain.py::test_explain_and_diff_for_people_and_machines": 0,
    "test_export_folders.py::test_the_systems_themselves_take_the_folders": 0,
    "test_export_launch.py::test_a_launched_folder_has_the_losses_of_one_process": 1,
    "test_few_packages.py::test_rows_profiles_and_plans_need_no_more_than_a_machine_of_torch_has": 0,
    "test_fewer_microbatches.py::test_few_microbatches_say_what_all_would": 0,
    "test_fidelity.py::test_predict_run_resume_and_draw": 0,
    "test_figure11.py::test_every_curve_is_there_once": 0,
    "test_gpu_day_small.py": 0,
    "test_launch.py::test_torchrun_runs_the_same_plan": 0,
    "test_microbench_alone.py::test_several_processes_measure_what_is_between_them": 0,
    "test_preprocess_run.py::test_served_batches_train_like_those_of_the_folder": 0,
    "test_run_devices.py::test_the_peak_of_one_rank_stands_beside_the_predicted_one": 0,
    "test_run_devices.py::test_traces_of_another_device_are_not_compared": 0,
    "test_schemas.py::test_every_shipped_profile_and_the_example_are_profiles": 0,
    "test_wheel.py": 0,
    # Kernels: what compiles for a GPU, and benchmarks' own bookkeeping.
    "test_kernels.py::test_error_is_at_most_twice_that_of_torch": 3,
    "test_kernels.py::test_heads_that_are_padded_in_registers": 3,
    "test_kernels_plan.py::test_plan_of_any_two_fields_is_the_planners": 0,
    "test_kernels_plan_compile.py::test_what_plans_a_mask_compiles_for_hopper": 0,
    "test_kernels_tasks.py::test_a_whole_model_layer_is_not_split": 0,
    "test_kernels_tasks.py::test_few_long_rows_are_split": 0,
    "test_masks_tiles.py::test_rows_that_repeat_an_earlier_one_are_as_walked": 0,
    "test_kernels_bench.py::test_a_second_call_goes_on_where_the_first_stopped": 0,
    "test_kernels_bench.py::test_contenders_that_need_no_gpu_agree": 0,
    "test_kernels_compile.py": 0,
    "test_kernels_plan.py::test_room_of_a_table_computes_nothing": 1,
    "test_kernels_tasks.py::test_cutting_where_it_pays_never_costs_much": 0,
    "test_partition.py::test_the_two_methods_agree_on_long_chains": 0,
}


def left_out(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Those of the collected tests that only `make test-all` runs."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        file = item.path.name
        name = file if file in THOROUGH else f"{file}::{item.name.split('[')[0]}"
        if name in THOROUGH:
            cases.setdefault(name, []).append(item)
    for name, of_test in cases.items():
        kept = THOROUGH[name]
        stays = {round(i * (len(of_test) - 1) / max(1, kept - 1)) for i in range(kept)}
        yield from (item for i, item in enumerate(of_test) if i not in stays)
