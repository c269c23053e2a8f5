"""The ``# HELP`` texts of the metrics of an engine core, by name of the family."""

from __future__ import annotations

from kvbaton.engine.stats import LATENCIES

TEXTS = {
    **{f"{name}_seconds": text for name, text, _ in LATENCIES},
    # --- requests and steps ---
    "kvbaton_requests_received": "Requests that the engine received, from all frontends.",
    "kvbaton_requests_finished": "Requests that ended, by reason.",
    "kvbaton_prompt_tokens": "Prompt tokens, by where their KV came from.",
    "kvbaton_prompt_tokens_cached_at_source": "Prompt tokens handed over that the source had "
    "cached.",
    "kvbaton_prompt_tokens_waiting": "Prompt tokens that are still to be computed.",
    "kvbaton_generation_tokens": "Tokens generated.",
    "kvbaton_sequences_waiting": "Sequences that wait for their first step.",
    "kvbaton_sequences_running": "Sequences that steps compute.",
    "kvbaton_sequences_loading": "Sequences whose KV is being loaded from a node or a store.",
    "kvbaton_preemptions": "Sequences preempted: their blocks were freed, to be computed again.",
    "kvbaton_step_token_budget": "Maximum number of tokens in a step.",
    "kvbaton_mixed_step_token_budget": "Maximum number of tokens in a step with decoding "
    "sequences.",
    "kvbaton_chunk_limit_tokens": "Current limit of prompt tokens in a step with decoding "
    "sequences.",
    "kvbaton_steps": "Steps.",
    "kvbaton_step_tokens": "Tokens computed in steps.",
    "kvbaton_step_seconds": "Time that steps took.",
    "kvbaton_step_cost_seconds": "Fitted cost of a step, by term of the fit.",
    "kvbaton_spec_decode_num_drafts": "Drafts verified.",
    "kvbaton_spec_decode_num_draft_tokens": "Draft tokens verified.",
    "kvbaton_spec_decode_num_accepted_tokens": "Draft tokens accepted.",
    "kvbaton_spec_decode_num_accepted_tokens_per_pos": "Draft tokens accepted, by position in the "
    "draft.",
    # --- blocks ---
    "kvbaton_blocks": "Blocks of the KV cache, by owner.",
    "kvbaton_blocks_available": "Blocks that sequences could get now, cached prefixes included.",
    "kvbaton_kv_event_batches": "Batches of KV events published.",
    "kvbaton_kv_event_batches_dropped": "Batches of KV events dropped because the queue was full.",
    # --- hand-overs ---
    "kvbaton_transfers": "Hand-overs ended, by role and outcome.",
    "kvbaton_transfers_live": "Hand-overs that hold blocks.",
    "kvbaton_transfers_quarantined": "Ended hand-overs whose blocks may still be written to.",
    "kvbaton_transfers_announced": "Hand-overs for which no target has reserved blocks yet.",
    "kvbaton_transfers_revived": "Prompts that were run again, for a target that asked late.",
    "kvbaton_leases": "The same as kvbaton_transfers_live, on a source.",
    "kvbaton_load_failures": "Hand-overs and loads from a store that failed.",
    "kvbaton_transfer_sent_bytes": "Bytes that have landed at other nodes.",
    "kvbaton_transfer_posted_bytes": "Bytes of writes that were posted.",
    "kvbaton_transfer_needed_bytes": "Bytes sent that targets needed, without gaps.",
    "kvbaton_transfer_writes": "Writes to other nodes.",
    "kvbaton_transfer_write_seconds": "Time of writes, each from its beginning to its end.",
    "kvbaton_transfer_plan_seconds": "Time to plan writes.",
    "kvbaton_transfer_notices": "Notices received that a write has landed.",
    "kvbaton_transfer_junk_notices": "Notices that can't be read, or belong to no hand-over.",
    "kvbaton_transfer_digests_checked": "Writes received whose digests were compared.",
    "kvbaton_transfer_digests_failed": "Writes received whose digests did not match.",
    "kvbaton_transfer_verify_seconds": "Time to verify writes received.",
    "kvbaton_transfer_errors": "Errors in transfers; the log has them.",
    "kvbaton_control_junk": "Control messages that can't be read, or are for another role.",
    "kvbaton_wire_cost_seconds": "Fitted time of KV from a peer, by term of the fit.",
    "kvbaton_wire_failures": "Consecutive hand-overs from a peer that failed.",
    # --- stores ---
    "kvbaton_store_lookups": "Lookups in the store, by outcome.",
    "kvbaton_store_loads": "Loads from the store, by outcome.",
    "kvbaton_store_load_blocks": "Blocks asked for from the store, by outcome.",
    "kvbaton_store_save_blocks": "Blocks offered to the store, by outcome.",
    "kvbaton_store_bytes": "Bytes loaded and verified, and bytes saved, by direction.",
    "kvbaton_store_seconds": "Time of loads and saves.",
    "kvbaton_store_call_seconds": "Time from calls of the store until their futures were done.",
    "kvbaton_store_errors": "Calls of the store that failed.",
    "kvbaton_store_circuit_open": "1 while the store is not called, by kind of call.",
    "kvbaton_store_circuit_opened": "Times that calls of the store were suspended.",
    "kvbaton_store_unhealthy": "1 while the store says that it can't serve.",
    "kvbaton_store_lookups_live": "Lookups in the store that are not answered yet.",
    "kvbaton_store_loads_live": "Loads from the store that have not ended yet.",
    "kvbaton_store_saves_queued": "Blocks that wait to be saved.",
    "kvbaton_store_objects": "Objects in the store.",
    "kvbaton_store_used_bytes": "Bytes of objects in the store.",
    "kvbaton_store_capacity_bytes": "Maximum bytes of objects in the store.",
    "kvbaton_store_tenant_bytes": "Bytes of objects in the store, by tenant.",
    # --- frontends ---
    "kvbaton_frontends": "Frontends connected.",
    "kvbaton_frontend_requests": "Requests of frontends.",
    "kvbaton_frontend_tokens": "Tokens sent to frontends.",
    "kvbaton_frontends_lost": "Frontends that went away or were dropped, with their requests.",
    "kvbaton_frontends_refused": "Connections refused without the cluster key.",
    "kvbaton_frontend_messages_dropped": "Messages of frontends that can't be read.",
    # --- encoder ---
    "kvbaton_encoder_items": "Encoder outputs, by where they came from.",
    "kvbaton_encoder_rows": "Rows of encoder outputs computed on this node.",
    "kvbaton_encoder_read_seconds": "Time to decode and resize images.",
    "kvbaton_encoder_encode_seconds": "Time to encode images.",
    # --- what is wrong ---
    "kvbaton_connector_failures": "Exceptions of connectors; the log has them.",
    "kvbaton_messages_failed": "Messages whose handling failed in the engine; the log has them.",
    "kvbaton_ledger_imbalance": "Blocks whose owners do not add up; 0, or there is a bug.",
    "kvbaton_unhealthy": "0, or something hangs; the log tells what.",
}
UNKNOWN = "Metric of a connector."
ENCODER, PLUGIN = "kvbaton_encoder_", "kvbaton_store_plugin_"


def text_of(family: str) -> str:
    """Help text of a family; metrics of the encoder's engine have the text of the engine's."""
    if family.startswith(PLUGIN):
        return "Metric of the store."
    if family.startswith(ENCODER) and family not in TEXTS:
        return f"Encoder: {text_of(family.replace(ENCODER, 'kvbaton_', 1))}"
    return TEXTS.get(family, UNKNOWN)
