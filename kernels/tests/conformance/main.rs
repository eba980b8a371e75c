//! The conformance suite of [`triptych_kernels::Backend`]: every check runs on every back end, instruction set
//! and precision of this machine, against plain functions in [`oracle`].
//!
//! Checks are generic functions named as sentences; the list at the end of this file makes each a test.
//!
//! The sets of aarch64 run on other machines under QEMU, with what `rustup target add aarch64-unknown-linux-gnu` and Debian's
//! packages `gcc-aarch64-linux-gnu` and `qemu-user` bring:
//!
//! ```text
//! export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
//! export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max'
//! cargo test --package triptych-kernels --target aarch64-unknown-linux-gnu
//! ```
//!
//! `max` has all sets, `neoverse-n1` all but `neoni8mm`, and `cortex-a53` neither dot product of bytes. It takes minutes.

mod added;
mod attention;
mod bias;
mod choosing;
mod conv;
mod errors;
mod experts;
mod invariance;
mod linear;
mod moving;
mod oracle;
mod paged;
mod recurrent;
mod rows;
mod sequences;
mod staging;
mod subject;

/// Makes a test of each check, which runs it on every subject, or, `without weights`, on one of those that differ by the kind of
/// their weights alone.
macro_rules! tests {
    ($($module:ident: $($check:ident),+;)+) => { tests! { @ |_| true; $($module: $($check),+;)+ } };
    (without weights; $($module:ident: $($check:ident),+;)+) => {
        tests! { @ |is_for_weights: bool| !is_for_weights; $($module: $($check),+;)+ }
    };
    (@ $takes:expr; $($module:ident: $($check:ident),+;)+) => {$($(
        #[test]
        fn $check() {
            let takes: fn(bool) -> bool = $takes;
            if let Some(subject) = subject::reference() {
                $module::$check(&subject);
            }
            for subject in subject::cpus().into_iter().filter(|subject| takes(subject.is_for_weights)) {
                $module::$check(&subject);
            }
            for subject in subject::cudas().into_iter().filter(|subject| takes(subject.is_for_weights)) {
                $module::$check(&subject);
            }
        }
    )+)+};
}

tests! {
    linear:
        linear_is_the_oracles_over_odd_sizes,
        linear_is_the_oracles_where_it_takes_several_tasks,
        linear_is_the_oracles_over_rows_of_whole_pages,
        every_activation_and_residual_is_applied_after_the_bias,
        stacked_layers_stand_side_by_side,
        a_scale_is_a_factor_on_weight_and_bias,
        weights_are_read_in_every_dtype_from_unaligned_bytes;
    experts:
        experts_are_the_oracles_over_odd_sizes,
        every_kind_of_routing_is_the_oracles,
        a_row_among_others_goes_to_its_experts_as_alone,
        equal_logits_choose_the_first_experts_and_no_number_is_the_lowest,
        experts_and_rows_that_do_not_fit_are_refused;
    moving:
        upload_and_download_are_inverse,
        stored_rows_are_widened_from_every_dtype,
        tables_give_their_rows_in_every_dtype,
        a_large_table_gives_its_rows_within_the_step_of_a_byte,
        a_tied_table_gives_the_rows_of_one_of_its_own,
        rows_are_gathered_and_scattered_by_number,
        rows_of_a_table_are_summed_by_weights,
        a_clone_keeps_its_values_when_the_other_is_written,
        columns_merged_and_split_rows_keep_the_order_of_values,
        sequences_are_transposed_each_by_itself;
    rows:
        norms_are_the_oracles_over_odd_widths,
        a_gate_multiplies_activated_and_plain_half,
        values_are_multiplied_by_an_activated_gate,
        a_sequence_is_normalised_as_a_whole,
        addition_is_by_element,
        capped_values_come_near_their_bound,
        rotary_embedding_turns_pairs_and_leaves_the_rest;
    conv:
        windows_of_a_signal_have_zeros_outside,
        windows_of_an_image_have_zeros_outside,
        a_channel_is_convolved_by_itself;
    choosing:
        greedy_choices_are_the_hosts_after_every_change,
        draws_are_the_hosts_within_rounding,
        choices_of_one_row_and_whole_rows_do_not_see_changes,
        a_row_that_allows_no_choice_fails_alone,
        a_choice_is_the_same_alone,
        batches_that_do_not_fit_are_refused,
        submitted_choices_are_those_that_are_waited_for,
        tokens_that_are_being_chosen_are_carried_over;
    invariance:
        a_row_of_a_linear_layer_is_the_same_alone,
        a_long_row_of_a_linear_layer_is_the_same_alone,
        a_sequence_is_the_same_alone,
        a_cached_sequence_is_the_same_alone,
        sequences_of_bounded_masks_are_the_same_alone,
        sequences_over_the_same_pages_are_the_same_alone,
        chunks_of_a_prefill_give_what_the_whole_gives,
        threads_do_not_change_a_bit,
        elementwise_rows_are_the_same_alone,
        a_convolved_image_and_a_normalised_sequence_are_the_same_alone;
    staging:
        a_handle_of_another_step_is_refused,
        where_an_array_lies_does_not_matter;
    errors:
        weights_that_do_not_fit_are_refused,
        shapes_that_do_not_agree_are_refused,
        indices_past_the_end_are_refused,
        offsets_that_are_not_offsets_are_refused,
        caches_refuse_what_they_do_not_hold,
        rows_of_one_projection_that_do_not_fit_are_refused,
        biases_that_do_not_fit_are_refused,
        convolutions_that_do_not_fit_are_refused,
        nothing_in_gives_nothing_out;
}

tests! {
    without weights;
    attention:
        attention_is_the_oracles_over_odd_sizes,
        attention_is_the_oracles_over_many_keys,
        bounds_of_the_mask_are_the_oracles,
        capped_scores_are_the_oracles,
        attention_is_the_oracles_over_wide_heads,
        queries_without_keys_give_zeros,
        attention_over_one_projection_is_that_over_its_parts,
        what_is_not_a_number_stays_in_its_sequence,
        large_scores_do_not_overflow;
    bias:
        a_bias_is_added_to_every_score,
        a_bias_reaches_over_many_keys,
        sequences_of_one_size_share_tables,
        keys_hidden_by_a_bias_weigh_nothing,
        a_bias_over_pages_is_that_inside_sequences,
        a_biased_sequence_is_the_same_alone,
        chunks_of_a_biased_prefill_give_what_the_whole_gives,
        weights_are_those_of_attention,
        a_query_that_sees_no_key_has_no_weights;
    paged:
        paged_attention_is_attention_whatever_the_block_tables,
        paged_attention_has_the_bounds_of_its_mask,
        paged_attention_caps_its_scores,
        bounds_change_no_bit_and_padding_gives_zeros,
        keys_and_values_side_by_side_are_those_apart,
        rows_of_one_projection_are_cached_as_their_parts_are,
        layers_and_copied_blocks_are_kept_apart,
        blocks_come_back_from_the_host_as_they_were,
        a_slot_written_again_has_the_later_key,
        what_lies_beyond_the_last_key_does_not_matter,
        block_bytes_add_up;
    recurrent:
        causal_convolutions_are_the_oracles_over_odd_sizes,
        the_delta_rule_is_the_oracles_over_odd_sizes,
        a_sequence_cut_into_steps_has_the_bits_of_the_whole,
        copied_states_go_on_as_the_original_would,
        slots_that_are_reset_have_nothing_of_what_was_there,
        padding_gives_zeros_and_leaves_every_state,
        layers_of_states_are_kept_apart,
        states_and_rows_that_do_not_fit_are_refused,
        weights_and_layouts_of_states_that_do_not_fit_are_refused;
}

#[test]
fn an_instruction_set_that_is_missing_is_refused() {
    use triptych_kernels::{CpuBackend, CpuConfig, Isa, KernelError};
    for isa in Isa::ALL {
        let made = CpuBackend::new(CpuConfig { isa: Some(isa), threads: 1, ..CpuConfig::default() });
        match made {
            Ok(backend) => {
                assert!(isa.is_available() && backend.isa() == isa);
                assert_eq!(Isa::named(isa.as_str()), Ok(isa));
            }
            Err(error) => {
                assert!(!isa.is_available());
                assert_eq!(error, KernelError::Isa(isa.as_str()));
                let unknown = Isa::named(isa.as_str()).expect_err("no set of this machine").to_string();
                assert!(unknown.starts_with(&format!("{:?} is no", isa.as_str())), "{unknown}");
                assert!(unknown.contains("which has portable"), "{unknown}");
            }
        }
    }
}
