"""Generates the dashboards in this folder: `python3 deploy/grafana/generate.py`. `--check` compares them with the files.

A dashboard has rows of panels; a panel has a title, a unit and queries. Common parts (variables, sizes, colours, legends) are
here once.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
WHERE = 'namespace=~"$namespace",release=~"$release"'
RATE = "[$__rate_interval]"
GREEN, ORANGE, RED = "green", "orange", "red"


def q(expr, legend):
    """A query; `%W` stands for the common matchers, `%R` for the window of rates."""
    return {"expr": expr.replace("%W", WHERE).replace("%R", RATE), "legendFormat": legend}


def quantiles(metric, legend="", where="", by=""):
    """Median, 90th and 99th percentile of a histogram."""
    labels = ", ".join(["le"] + ([by] if by else []))
    inside = WHERE + ("," + where if where else "")
    return [
        q(f"histogram_quantile({p}, sum by ({labels}) (rate({metric}_bucket{{{inside}}}%R)))", f"{legend}p{int(p * 100)}".strip())
        for p in (0.5, 0.9, 0.99)
    ]


def panel(title, unit, queries, says="", kind="timeseries", thresholds=(), stack=False, top=None):
    """One panel; thresholds are (value, colour), the first colour is green."""
    steps = [{"color": GREEN, "value": None}] + [{"color": colour, "value": value} for value, colour in thresholds]
    custom = {
        "drawStyle": "line", "lineWidth": 1, "fillOpacity": 20 if stack else 5, "showPoints": "never", "spanNulls": False,
        "stacking": {"mode": "normal" if stack else "none", "group": "A"},
        "thresholdsStyle": {"mode": "line" if thresholds else "off"},
    }
    defaults = {"unit": unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "palette-classic"}}
    if top is not None:
        defaults["max"] = top
    made = {
        "type": kind, "title": title, "description": says, "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [dict(query, refId=chr(ord("A") + i), range=kind != "stat", instant=kind == "stat",
                         datasource={"type": "prometheus", "uid": "${datasource}"}) for i, query in enumerate(queries)],
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
    if kind == "stat":
        defaults["color"] = {"mode": "thresholds"}
        made["options"] = {"colorMode": "background", "graphMode": "none", "textMode": "value_and_name",
                           "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    else:
        defaults["custom"] = custom
        made["options"] = {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
                           "tooltip": {"mode": "multi", "sort": "desc"}}
    return made


def variable(name, label, query):
    return {"name": name, "label": label, "type": "query", "query": {"query": query, "refId": name}, "refresh": 2, "sort": 1,
            "datasource": {"type": "prometheus", "uid": "${datasource}"}, "includeAll": True, "allValue": ".*", "multi": True,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]}}


def dashboard(uid, title, says, rows):
    """Rows are (title, panels); stats share a row's width, others are two a row."""
    panels, y, n = [], 0, 0
    for name, row in rows:
        panels.append({"type": "row", "title": name, "collapsed": False, "panels": [], "id": n + 1, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}})
        n, y, x = n + 1, y + 1, 0
        width = 24 // len(row) if row[0]["type"] == "stat" else 12
        height = 4 if row[0]["type"] == "stat" else 8
        for one in row:
            if x + width > 24:
                x, y = 0, y + height
            panels.append(dict(one, id=n + 1, gridPos={"h": height, "w": width, "x": x, "y": y}))
            n, x = n + 1, x + width
        y += height
    datasource = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": uid, "title": title, "description": says, "tags": ["triptych"], "schemaVersion": 39, "version": 1, "editable": True,
        "timezone": "browser", "time": {"from": "now-3h", "to": "now"}, "refresh": "30s", "graphTooltip": 1, "annotations": {"list": []},
        "links": [{"title": "Triptych", "type": "dashboards", "tags": ["triptych"], "asDropdown": True, "includeVars": True, "keepTime": True}],
        "templating": {"list": [datasource, variable("namespace", "Namespace", "label_values(triptych_fleet_workers, namespace)"),
                                variable("release", "Release", "label_values(triptych_fleet_workers, release)")]},
        "panels": panels,
    }


def requests():
    proxy = '%W,component="proxy"'
    return dashboard("triptych-requests", "Triptych: requests", "From admission to the last token, stage by stage.", [
        ("Client view", [
            panel("Requests", "reqps", [q(f"sum by (outcome) (rate(triptych_requests_total{{{proxy}}}%R))", "{{outcome}}")], "Ended requests by outcome.", stack=True),
            panel("Requests in flight", "short", [q(f"sum by (instance) (triptych_requests_running{{{proxy}}})", "{{instance}}")], "Per proxy. At --max-in-flight further requests are rejected."),
            panel("Time to first token", "s", quantiles("triptych_time_to_first_token_seconds", where='component="proxy"'), thresholds=[(1.6384, RED)]),
            panel("Time per output token", "s", quantiles("triptych_time_per_output_token_seconds", where='component="proxy"')),
            panel("Time to last token", "s", quantiles("triptych_e2e_request_latency_seconds", where='component="proxy"')),
            panel("Tokens", "short", [q(f"sum(rate(triptych_prompt_tokens_total{{{proxy}}}%R))", "prompt, per second"), q(f"sum(rate(triptych_generation_tokens_total{{{proxy}}}%R))", "generated, per second")]),
        ]),
        ("Time per stage", [
            panel("Time per stage, p90", "s", [
                q(f"histogram_quantile(0.9, sum by (le) (rate({metric}_bucket{{%W}}%R)))", legend) for metric, legend in [
                    ("triptych_encode_queue_time_seconds", "1 encoder queue"), ("triptych_preprocess_time_seconds", "2 preprocess"),
                    ("triptych_encode_time_seconds", "3 encode"), ("triptych_ec_publish_time_seconds", "4 publish"),
                    ("triptych_ec_load_time_seconds", "5 load"), ("triptych_pd_queue_time_seconds", "6 engine queue"),
                    ("triptych_prefill_time_seconds", "7 prefill")]], "Stages do not add up: a request with cached items skips 1 to 4."),
            panel("Encoder queue time", "s", quantiles("triptych_encode_queue_time_seconds", by="modality", legend="{{modality}} ")),
            panel("Engine queue time", "s", quantiles("triptych_pd_queue_time_seconds")),
            panel("Engine step time", "s", quantiles("triptych_engine_step_time_seconds"), "Time between two tokens of every running answer."),
        ]),
        ("Items", [
            panel("Items by source", "short", [q(f"sum by (source) (rate(triptych_item_source_total{{{proxy}}}%R))", "{{source}}")], "Per second.", stack=True),
            panel("Encode jobs by cause", "short", [q(f"sum by (why) (rate(triptych_encode_jobs_total{{{proxy}}}%R))", "{{why}}")], "First attempts, retries and hedges.", stack=True),
        ]),
        ("Retries and rejections", [
            panel("Retries and resumed streams", "short", [q(f"sum(rate(triptych_pd_retries_total{{{proxy}}}%R))", "before the first token"), q(f"sum(rate(triptych_resumed_streams_total{{{proxy}}}%R))", "resumed streams")], "Requests per second that were sent to a PD worker again."),
            panel("Retry budget exhausted, admission rejections", "short", [q(f"sum by (for) (rate(triptych_retry_budget_exhausted_total{{{proxy}}}%R))", "budget exhausted: {{for}}"), q(f"sum by (stage) (rate(triptych_admission_rejections_total{{{proxy}}}%R))", "rejected: {{stage}}")]),
        ]),
    ])


def store():
    return dashboard("triptych-ec", "Triptych: encoder outputs", "Hits, misses, traffic and errors, tier by tier.", [
        ("Overview", [
            panel("Hit ratio", "percentunit", [q("sum(rate(triptych_ec_hits_total{%W}[5m])) / (sum(rate(triptych_ec_hits_total{%W}[5m])) + (sum(rate(triptych_ec_misses_total{%W}[5m])) or vector(0)))", "of loads")], kind="stat"),
            panel("Failed operations", "percentunit", [q('(sum(rate(triptych_ec_operations_total{%W,outcome=~"unavailable|timed_out"}[5m])) or vector(0)) / sum(rate(triptych_ec_operations_total{%W}[5m]))', "unavailable or timed out")], kind="stat", thresholds=[(0.01, ORANGE), (0.05, RED)]),
            panel("Corrupt objects", "short", [q("sum(increase(triptych_ec_corrupt_objects_total{%W}[1h])) or vector(0)", "per hour")], kind="stat", thresholds=[(1, RED)]),
        ]),
        ("By tier", [
            panel("Hits", "ops", [q("sum by (tier) (rate(triptych_ec_hits_total{%W}%R))", "{{tier}}")], stack=True),
            panel("Misses", "ops", [q("sum by (tier) (rate(triptych_ec_misses_total{%W}%R))", "{{tier}}")], stack=True),
            panel("Operations", "ops", [q("sum by (tier, op) (rate(triptych_ec_operations_total{%W}%R))", "{{tier}} {{op}}")]),
            panel("Unsuccessful operations", "ops", [q('sum by (tier, op, outcome) (rate(triptych_ec_operations_total{%W,outcome!~"ok|miss|already_there|held"}%R))', "{{tier}} {{op}} {{outcome}}")]),
            panel("Operation time, p99", "s", [q("histogram_quantile(0.99, sum by (le, tier, op) (rate(triptych_ec_operation_time_seconds_bucket{%W}%R)))", "{{tier}} {{op}}")]),
            panel("Bytes transferred", "Bps", [q("sum by (tier, op) (rate(triptych_ec_transferred_bytes_total{%W}%R))", "{{tier}} {{op}}")]),
        ]),
        ("Time in requests", [
            panel("Publish time", "s", quantiles("triptych_ec_publish_time_seconds")),
            panel("Load time", "s", quantiles("triptych_ec_load_time_seconds")),
            panel("Wait for pending items", "s", quantiles("triptych_pending_item_wait_seconds"), "On PD workers that got a request before its items were encoded."),
            panel("Leases", "short", [q("sum by (outcome) (rate(triptych_encode_leases_total{%W}%R))", "{{outcome}}")], "Encode leases by outcome. taken_over: the first holder died."),
        ]),
    ])


def pools():
    return dashboard("triptych-pools", "Triptych: pools", "Encoders and PD workers: number, load and memory.", [
        ("Fleet", [
            panel("Ready workers", "short", [q('min by (role) (sum by (role, instance) (triptych_fleet_workers{%W,state=~"ready|probing"}))', "{{role}}")], "Minimum over proxies.", kind="stat", thresholds=[(0, RED), (1, GREEN)]),
            panel("Down or ejected workers", "short", [q('max by (role) (sum by (role, instance) (triptych_fleet_workers{%W,state=~"down|ejected"}))', "{{role}}")], "Maximum over proxies.", kind="stat", thresholds=[(1, ORANGE)]),
            panel("Draining", "short", [q('sum(triptych_draining{%W})', "processes")], kind="stat"),
        ]),
        ("Workers", [
            panel("Workers by state", "short", [q('max by (role, state) (triptych_fleet_workers{%W})', "{{role}} {{state}}")]),
            panel("Ejections", "short", [q("sum by (role, cause) (increase(triptych_worker_ejections_total{%W}%R))", "{{role}} {{cause}}")]),
            panel("Worker picks by reason", "short", [q("sum by (role, reason) (rate(triptych_worker_picks_total{%W}%R))", "{{role}} {{reason}}")], "Per second."),
            panel("Up", "short", [q('sum by (component) (up{%W,component=~"proxy|encoder|pd|store"})', "{{component}}")], "Targets that can be scraped."),
        ]),
        ("Encoders", [
            panel("Backlog", "s", [q("max by (worker_pool, model, modality) (triptych_encode_backlog_seconds{%W})", "{{worker_pool}} {{model}} {{modality}}")], "Predicted encode time, maximum over workers.", thresholds=[(5, RED)]),
            panel("Queued output tokens", "short", [q("sum by (worker_pool, model, modality) (triptych_encode_queued_tokens{%W})", "{{worker_pool}} {{model}} {{modality}}")], "Target metric of autoscaling."),
            panel("Items encoded", "short", [q("sum by (worker_pool, modality) (rate(triptych_encodes_total{%W}%R))", "{{worker_pool}} {{modality}}")], "Per second.", stack=True),
            panel("Batch size in items and tokens, mean", "short", [q("sum by (worker_pool) (rate(triptych_encode_batch_items_sum{%W}%R)) / sum by (worker_pool) (rate(triptych_encode_batch_items_count{%W}%R))", "{{worker_pool}} items"), q("sum by (worker_pool) (rate(triptych_encode_batch_tokens_sum{%W}%R)) / sum by (worker_pool) (rate(triptych_encode_batch_tokens_count{%W}%R))", "{{worker_pool}} tokens")]),
            panel("Forwards with and without a CUDA graph", "short", [q("sum by (worker_pool) (rate(triptych_encode_graph_replays_total{%W}%R))", "{{worker_pool}} replayed"), q("sum by (worker_pool) (rate(triptych_encode_eager_forwards_total{%W}%R))", "{{worker_pool}} eager")], "Per second, on workers with a GPU."),
            panel("Padding of replayed graphs", "percentunit", [q("sum by (worker_pool) (rate(triptych_encode_graph_padding_tokens_total{%W}%R)) / sum by (worker_pool) (rate(triptych_encode_graph_tokens_total{%W}%R))", "{{worker_pool}}")], "Share of output tokens. Budgets between those there are lower it.", top=1),
            panel("Encoders with weights in memory", "short", [q("sum by (worker_pool, model) (triptych_encoder_weights_loaded{%W})", "{{worker_pool}} {{model}}")], "Of lazy weights (--encoder-weights lazy), those that are loaded."),
            panel("GPU memory of encoder graphs", "bytes", [q("sum by (worker_pool) (triptych_encode_graph_memory_bytes{%W})", "{{worker_pool}}")], "Each captured budget keeps its activations."),
        ]),
        ("PD workers", [
            panel("Requests", "short", [q('sum by (worker_pool) (triptych_requests_running{%W,component="pd",model!=""})', "{{worker_pool}} running"), q("sum by (worker_pool) (triptych_requests_waiting{%W})", "{{worker_pool}} waiting")]),
            panel("KV cache usage, maximum over workers", "percentunit", [q("max by (worker_pool, pool) (triptych_kv_cache_usage_ratio{%W})", "{{worker_pool}} {{pool}}")], "self: prompts and answers; cross: encoder outputs; host: swapped-out blocks; state: recurrent states.", thresholds=[(0.95, RED)], top=1),
            panel("Preemptions", "short", [q("sum by (worker_pool) (rate(triptych_preemptions_total{%W}%R))", "{{worker_pool}} all"), q("sum by (worker_pool) (rate(triptych_preemption_swaps_total{%W}%R))", "{{worker_pool}} swapped to host")], "Sequences per second."),
            panel("Computed and cached tokens", "short", [q("sum by (worker_pool) (rate(triptych_computed_tokens_total{%W}%R))", "{{worker_pool}} computed"), q("sum by (worker_pool) (rate(triptych_cached_prompt_tokens_total{%W}%R))", "{{worker_pool}} cached")], "Per second; cached: prompt tokens in the prefix cache."),
            panel("Decode steps with and without a CUDA graph", "short", [q("sum by (worker_pool) (rate(triptych_decode_graph_replays_total{%W}%R))", "{{worker_pool}} replayed"), q("sum by (worker_pool) (rate(triptych_decode_eager_steps_total{%W}%R))", "{{worker_pool}} eager")], "Per second, on workers with a GPU."),
            panel("Padding of replayed decode graphs", "percentunit", [q("sum by (worker_pool) (rate(triptych_decode_graph_padding_tokens_total{%W}%R)) / sum by (worker_pool) (rate(triptych_decode_graph_tokens_total{%W}%R))", "{{worker_pool}}")], "Share of rows.", top=1),
            panel("GPU memory of decode graphs", "bytes", [q("sum by (worker_pool) (triptych_decode_graph_memory_bytes{%W})", "{{worker_pool}}")], "Each captured shape keeps its activations, up to --decode-graph-mib."),
        ]),
    ])


def slo():
    left = "1 - triptych:{0}:ratio_rate3d{{%W}} / (1 - scalar(triptych:slo_objective:ratio))"
    burn = "triptych:{0}:ratio_rate{1}{{%W}} / (1 - scalar(triptych:slo_objective:ratio))"
    thresholds = [(1, ORANGE), (6, "semi-dark-orange"), (14.4, RED)]

    def budget(rule, what):
        return panel(f"Error budget over 3 days: {what}", "percentunit", [q(left.format(rule), "left")], "Below zero: the objective is missed.", kind="stat", thresholds=[(0, GREEN)])

    def burning(rule, what):
        return panel(f"Burn rate: {what}", "short", [q(burn.format(rule, window), window) for window in ("5m", "1h", "6h", "3d")],
                     "1 uses up exactly the budget. Pages at 14.4 over one hour, and at 6 over six hours.", thresholds=thresholds)

    made = dashboard("triptych-slo", "Triptych: SLO", "Server errors, late first tokens, and error budget.", [
        ("Error budget", [budget("request_errors", "server errors"), budget("late_first_tokens", "late first tokens"),
                  panel("Objective", "percentunit", [q("triptych:slo_objective:ratio", "of requests")], kind="stat")]),
        ("Burn rate", [burning("request_errors", "server errors"), burning("late_first_tokens", "late first tokens")]),
        ("Errors", [panel("Server errors", "reqps", [q('sum by (outcome) (rate(triptych_requests_total{%W,component="proxy",outcome=~"unavailable|deadline_exceeded|internal|mismatch"}%R))', "{{outcome}}")], stack=True),
                        panel("First tokens within the objective", "percentunit", [q("1 - triptych:late_first_tokens:ratio_rate5m{%W}", "five minutes")], top=1)]),
    ])
    for one in made["panels"]:
        if one["type"] == "stat" and one["title"].startswith("Error budget"):
            one["fieldConfig"]["defaults"]["thresholds"]["steps"] = [{"color": RED, "value": None}, {"color": ORANGE, "value": 0}, {"color": GREEN, "value": 0.25}]
            one["fieldConfig"]["defaults"].pop("min")
    return made


def main():
    stale = []
    for name, make in [("requests", requests), ("ec", store), ("pools", pools), ("slo", slo)]:
        text, path = json.dumps(make(), indent=1) + "\n", HERE / f"{name}.json"
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"differ from the output of generate.py: {', '.join(stale)}")


main()
