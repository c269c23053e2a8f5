"""What ``# HELP`` says of each metric of an engine core, by its family's name."""

from __future__ import annotations

from kvbaton.engine.stats import LATENCIES

TEXTS = {
    **{f"{name}_seconds": text for name, text, _ in LATENCIES},
    # --- requests and steps ---
    "kvbaton_requests_received": "Requests that the engine got, whoever asked.",
    "kvbaton_requests_finished": "Requests that ended, by reason.",
    "kvbaton_prompt_tokens": "Tokens of prompts, by where their KV came from.",
    "kvbaton_prompt_tokens_cached_at_source": "Transferred ones that the source had cached.",
    "kvbaton_prompt_tokens_waiting": "Tokens that prompts here have yet to be computed.",
    "kvbaton_generation_tokens": "Tokens put out.",
    "kvbaton_sequences_waiting": "Sequences that wait for their first step.",
    "kvbaton_sequences_running": "Sequences that steps compute.",
    "kvbaton_sequences_loading": "Sequences whose KV comes from a node or a store.",
    "kvbaton_preemptions": "Sequences that gave up their blocks, to be computed anew.",
    "kvbaton_step_token_budget": "Most tokens of a step.",
    "kvbaton_mixed_step_token_budget": "Most tokens of a step with sequences that decode.",
    "kvbaton_chunk_limit_tokens": "Most tokens of prompts in such a step, as last asked for.",
    "kvbaton_steps": "Steps.",
    "kvbaton_step_tokens": "Tokens in steps.",
    "kvbaton_step_seconds": "Time that steps took.",
    "kvbaton_step_cost_seconds": "Estimated time of a step, by what it is proportional to.",
    "kvbaton_spec_decode_num_drafts": "Drafts that were verified.",
    "kvbaton_spec_decode_num_draft_tokens": "Tokens of drafts.",
    "kvbaton_spec_decode_num_accepted_tokens": "Tokens of drafts that were accepted.",
    "kvbaton_spec_decode_num_accepted_tokens_per_pos": "The same, by their place in the draft.",
    # --- blocks ---
    "kvbaton_blocks": "Blocks of the KV cache, by owner.",
    "kvbaton_blocks_available": "Blocks that sequences could get now, cached prefixes included.",
    "kvbaton_kv_event_batches": "Batches of KV events published.",
    "kvbaton_kv_event_batches_dropped": "Batches of KV events that a full queue had no room for.",
    # --- hand-overs ---
    "kvbaton_transfers": "Hand-overs ended, by role and outcome.",
    "kvbaton_transfers_live": "Hand-overs that hold blocks.",
    "kvbaton_transfers_quarantined": "Ended ones whose blocks may still be written to.",
    "kvbaton_transfers_announced": "Hand-overs of which no target has asked for anything yet.",
    "kvbaton_transfers_revived": "Prompts that were run once more, for a target that asked late.",
    "kvbaton_leases": "The same as kvbaton_transfers_live, of a source.",
    "kvbaton_load_failures": "Hand-overs and loads from a store that failed.",
    "kvbaton_transfer_sent_bytes": "Bytes that have arrived at others.",
    "kvbaton_transfer_posted_bytes": "Bytes of writes that were begun.",
    "kvbaton_transfer_needed_bytes": "Bytes that targets needed of those, gaps left out.",
    "kvbaton_transfer_writes": "Writes to others.",
    "kvbaton_transfer_write_seconds": "Time of writes, each from its beginning to its end.",
    "kvbaton_transfer_plan_seconds": "Time to plan writes.",
    "kvbaton_transfer_notices": "Notices that a write has landed here.",
    "kvbaton_transfer_junk_notices": "Notices that can't be read, or are of no hand-over here.",
    "kvbaton_transfer_digests_checked": "Writes from others whose digests were compared.",
    "kvbaton_transfer_digests_failed": "Those with bytes that were wrong.",
    "kvbaton_transfer_verify_seconds": "Time of these checks.",
    "kvbaton_transfer_errors": "What failed in transfers; the log has it.",
    "kvbaton_control_junk": "Control messages that can't be read, or are for another role.",
    "kvbaton_wire_cost_seconds": "Estimated time of what a peer sends, by term.",
    "kvbaton_wire_failures": "Hand-overs from a peer that failed in a row.",
    # --- stores ---
    "kvbaton_store_lookups": "Lookups, by outcome.",
    "kvbaton_store_loads": "Loads, by outcome.",
    "kvbaton_store_load_blocks": "Blocks asked for, by outcome.",
    "kvbaton_store_save_blocks": "Blocks offered, by outcome.",
    "kvbaton_store_bytes": "Bytes that came right, and that it keeps since, by direction.",
    "kvbaton_store_seconds": "Time of loads and saves.",
    "kvbaton_store_call_seconds": "From calls of the store until their futures were done.",
    "kvbaton_store_errors": "Calls that failed.",
    "kvbaton_store_circuit_open": "1 while the store is left alone, by kind of calls.",
    "kvbaton_store_circuit_opened": "How often it began to be left alone.",
    "kvbaton_store_unhealthy": "1 while the store says that it can't serve.",
    "kvbaton_store_lookups_live": "Lookups that have yet to be answered.",
    "kvbaton_store_loads_live": "Loads that have yet to end.",
    "kvbaton_store_saves_queued": "Blocks that wait to be saved.",
    "kvbaton_store_objects": "Objects in the store.",
    "kvbaton_store_used_bytes": "Their bytes.",
    "kvbaton_store_capacity_bytes": "Bytes that the store holds at most.",
    "kvbaton_store_tenant_bytes": "Bytes by tenant.",
    # --- frontends ---
    "kvbaton_frontends": "Frontends that are connected.",
    "kvbaton_frontend_requests": "Requests of frontends.",
    "kvbaton_frontend_tokens": "Tokens told to frontends.",
    "kvbaton_frontends_lost": "Frontends that went away or were dropped, with their requests.",
    "kvbaton_frontends_refused": "Connections without the cluster key.",
    "kvbaton_frontend_messages_dropped": "Messages of frontends that can't be read.",
    # --- encoder ---
    "kvbaton_encoder_items": "Encoder outputs, by where they came from.",
    "kvbaton_encoder_rows": "Rows of outputs that were encoded here.",
    "kvbaton_encoder_read_seconds": "Time to read pictures.",
    "kvbaton_encoder_encode_seconds": "Time to encode them.",
    # --- what is wrong ---
    "kvbaton_connector_failures": "What a connector raised; the log has it.",
    "kvbaton_messages_failed": "Messages that the engine failed at; the log has them.",
    "kvbaton_ledger_imbalance": "Blocks whose owners do not add up; 0, or there is a bug.",
    "kvbaton_unhealthy": "0, or something hangs; the log tells what.",
}
UNKNOWN = "A connector's own."
ENCODER, PLUGIN = "kvbaton_encoder_", "kvbaton_store_plugin_"


def text_of(family: str) -> str:
    """For people; of an encoder's own what the language model's of that name says."""
    if family.startswith(PLUGIN):
        return "The store's own."
    if family.startswith(ENCODER) and family not in TEXTS:
        return f"Of the encoder: {text_of(family.replace(ENCODER, 'kvbaton_', 1))}"
    return TEXTS.get(family, UNKNOWN)
