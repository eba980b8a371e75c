"""Writes the dashboards beside it: `python3 deploy/grafana/generate.py`, and with `--check` says whether they are as written.

A dashboard is rows of panels, a panel is a title, a unit and queries. All that dashboards have in common (variables, sizes,
colours, legends) is here once.
"""

import json
import pathlib
import sys

HERE = pathlib.Path(__file__).parent
WHERE = 'namespace=~"$namespace",release=~"$release"'
RATE = "[$__rate_interval]"
GREEN, ORANGE, RED = "green", "orange", "red"


def q(expr, legend):
    """A query; `%W` is where, `%R` the window of rates."""
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
    return dashboard("triptych-requests", "Triptych: the way of a request", "From the proxy's door to the last token, stage by stage.", [
        ("What clients see", [
            panel("Requests", "reqps", [q(f"sum by (outcome) (rate(triptych_requests_total{{{proxy}}}%R))", "{{outcome}}")], "Ended requests, by how.", stack=True),
            panel("In the house", "short", [q(f"sum by (instance) (triptych_requests_running{{{proxy}}})", "{{instance}}")], "Requests that a proxy works on. At --max-in-flight the next one is sent away."),
            panel("Time to first token", "s", quantiles("triptych_time_to_first_token_seconds", where='component="proxy"'), thresholds=[(1.6384, RED)]),
            panel("Time per output token", "s", quantiles("triptych_time_per_output_token_seconds", where='component="proxy"')),
            panel("Time to last token", "s", quantiles("triptych_e2e_request_latency_seconds", where='component="proxy"')),
            panel("Tokens", "short", [q(f"sum(rate(triptych_prompt_tokens_total{{{proxy}}}%R))", "read, per second"), q(f"sum(rate(triptych_generation_tokens_total{{{proxy}}}%R))", "written, per second")]),
        ]),
        ("Where the time goes", [
            panel("Each stage, 90th percentile", "s", [
                q(f"histogram_quantile(0.9, sum by (le) (rate({metric}_bucket{{%W}}%R)))", legend) for metric, legend in [
                    ("triptych_encode_queue_time_seconds", "1 waiting for an encoder"), ("triptych_preprocess_time_seconds", "2 preprocessing"),
                    ("triptych_encode_time_seconds", "3 encoder forward"), ("triptych_ec_publish_time_seconds", "4 publishing"),
                    ("triptych_ec_load_time_seconds", "5 loading"), ("triptych_pd_queue_time_seconds", "6 waiting for the engine"),
                    ("triptych_prefill_time_seconds", "7 prefill")]], "Not a sum: a request whose items are cached skips 1 to 4."),
            panel("Waiting for an encoder", "s", quantiles("triptych_encode_queue_time_seconds", by="modality", legend="{{modality}} ")),
            panel("Waiting for the engine", "s", quantiles("triptych_pd_queue_time_seconds")),
            panel("One engine step", "s", quantiles("triptych_engine_step_time_seconds"), "The pause between two tokens of every answer that runs."),
        ]),
        ("Items", [
            panel("Where encoder outputs came from", "short", [q(f"sum by (source) (rate(triptych_item_source_total{{{proxy}}}%R))", "{{source}}")], "Items a second.", stack=True),
            panel("Encoder jobs, by why they were sent", "short", [q(f"sum by (why) (rate(triptych_encode_jobs_total{{{proxy}}}%R))", "{{why}}")], "Retries and hedges beside the first ones.", stack=True),
        ]),
        ("What went wrong and was mended", [
            panel("Sent again", "short", [q(f"sum(rate(triptych_pd_retries_total{{{proxy}}}%R))", "before the first token"), q(f"sum(rate(triptych_resumed_streams_total{{{proxy}}}%R))", "in the middle of an answer")], "Requests a second that another PD worker went on with."),
            panel("Not tried again, and refused", "short", [q(f"sum by (for) (rate(triptych_retry_budget_exhausted_total{{{proxy}}}%R))", "budget spent: {{for}}"), q(f"sum by (stage) (rate(triptych_admission_rejections_total{{{proxy}}}%R))", "too late: {{stage}}")]),
        ]),
    ])


def store():
    return dashboard("triptych-ec", "Triptych: encoder outputs", "What is found, moved and lost, tier by tier.", [
        ("At a glance", [
            panel("Found", "percentunit", [q("sum(rate(triptych_ec_hits_total{%W}[5m])) / (sum(rate(triptych_ec_hits_total{%W}[5m])) + (sum(rate(triptych_ec_misses_total{%W}[5m])) or vector(0)))", "loads that found their object")], kind="stat"),
            panel("Operations that fail", "percentunit", [q('(sum(rate(triptych_ec_operations_total{%W,outcome=~"unavailable|timed_out"}[5m])) or vector(0)) / sum(rate(triptych_ec_operations_total{%W}[5m]))', "unavailable or too late")], kind="stat", thresholds=[(0.01, ORANGE), (0.05, RED)]),
            panel("Did not verify", "short", [q("sum(increase(triptych_ec_corrupt_objects_total{%W}[1h])) or vector(0)", "objects in an hour")], kind="stat", thresholds=[(1, RED)]),
        ]),
        ("By tier", [
            panel("Found", "ops", [q("sum by (tier) (rate(triptych_ec_hits_total{%W}%R))", "{{tier}}")], stack=True),
            panel("Not found", "ops", [q("sum by (tier) (rate(triptych_ec_misses_total{%W}%R))", "{{tier}}")], stack=True),
            panel("Operations", "ops", [q("sum by (tier, op) (rate(triptych_ec_operations_total{%W}%R))", "{{tier}} {{op}}")]),
            panel("Operations that did not end well", "ops", [q('sum by (tier, op, outcome) (rate(triptych_ec_operations_total{%W,outcome!~"ok|miss|already_there|held"}%R))', "{{tier}} {{op}} {{outcome}}")]),
            panel("Time of an operation, 99th percentile", "s", [q("histogram_quantile(0.99, sum by (le, tier, op) (rate(triptych_ec_operation_time_seconds_bucket{%W}%R)))", "{{tier}} {{op}}")]),
            panel("Bytes moved", "Bps", [q("sum by (tier, op) (rate(triptych_ec_transferred_bytes_total{%W}%R))", "{{tier}} {{op}}")]),
        ]),
        ("In the way of a request", [
            panel("Publishing", "s", quantiles("triptych_ec_publish_time_seconds")),
            panel("Loading", "s", quantiles("triptych_ec_load_time_seconds")),
            panel("Waiting for an item that is being encoded", "s", quantiles("triptych_pending_item_wait_seconds"), "PD workers that began before their items were there."),
            panel("Leases", "short", [q("sum by (outcome) (rate(triptych_encode_leases_total{%W}%R))", "{{outcome}}")], "So that one item is encoded once, whoever asks. taken_over: its first holder was gone."),
        ]),
    ])


def pools():
    return dashboard("triptych-pools", "Triptych: pools", "Encoders and PD workers: how many, how busy, how full.", [
        ("Fleet, as the proxies see it", [
            panel("Takes work", "short", [q('min by (role) (sum by (role, instance) (triptych_fleet_workers{%W,state=~"ready|probing"}))', "{{role}}")], "The proxy that sees fewest.", kind="stat", thresholds=[(0, RED), (1, GREEN)]),
            panel("Does not", "short", [q('max by (role) (sum by (role, instance) (triptych_fleet_workers{%W,state=~"down|ejected"}))', "{{role}}")], "The proxy that sees most.", kind="stat", thresholds=[(1, ORANGE)]),
            panel("Draining", "short", [q('sum(triptych_draining{%W})', "processes that stop")], kind="stat"),
        ]),
        ("Choices", [
            panel("Workers by state", "short", [q('max by (role, state) (triptych_fleet_workers{%W})', "{{role}} {{state}}")]),
            panel("Ejections", "short", [q("sum by (role, cause) (increase(triptych_worker_ejections_total{%W}%R))", "{{role}} {{cause}}")]),
            panel("Why a worker was chosen", "short", [q("sum by (role, reason) (rate(triptych_worker_picks_total{%W}%R))", "{{role}} {{reason}}")], "Pieces of work a second."),
            panel("Up", "short", [q('sum by (component) (up{%W,component=~"proxy|encoder|pd|store"})', "{{component}}")], "Processes that can be scraped."),
        ]),
        ("Encoders", [
            panel("Work that waits or runs", "s", [q("max by (worker_pool, model, modality) (triptych_encode_backlog_seconds{%W})", "{{worker_pool}} {{model}} {{modality}}")], "Predicted, of the busiest worker.", thresholds=[(5, RED)]),
            panel("Output tokens that wait or run", "short", [q("sum by (worker_pool, model, modality) (triptych_encode_queued_tokens{%W})", "{{worker_pool}} {{model}} {{modality}}")], "What pools are scaled by."),
            panel("Items encoded", "short", [q("sum by (worker_pool, modality) (rate(triptych_encodes_total{%W}%R))", "{{worker_pool}} {{modality}}")], "A second.", stack=True),
            panel("Items and tokens of a batch, mean", "short", [q("sum by (worker_pool) (rate(triptych_encode_batch_items_sum{%W}%R)) / sum by (worker_pool) (rate(triptych_encode_batch_items_count{%W}%R))", "{{worker_pool}} items"), q("sum by (worker_pool) (rate(triptych_encode_batch_tokens_sum{%W}%R)) / sum by (worker_pool) (rate(triptych_encode_batch_tokens_count{%W}%R))", "{{worker_pool}} tokens")]),
        ]),
        ("PD workers", [
            panel("Requests", "short", [q('sum by (worker_pool) (triptych_requests_running{%W,component="pd",model!=""})', "{{worker_pool}} run"), q("sum by (worker_pool) (triptych_requests_waiting{%W})", "{{worker_pool}} wait")]),
            panel("KV blocks in use, fullest worker", "percentunit", [q("max by (worker_pool, pool) (triptych_kv_cache_usage_ratio{%W})", "{{worker_pool}} {{pool}}")], "self: prompts and answers; cross: encoder outputs; host: what had to give way.", thresholds=[(0.95, RED)], top=1),
            panel("Gave way", "short", [q("sum by (worker_pool) (rate(triptych_preemptions_total{%W}%R))", "{{worker_pool}} all"), q("sum by (worker_pool) (rate(triptych_preemption_swaps_total{%W}%R))", "{{worker_pool}} kept on the host")], "Sequences a second."),
            panel("Token rows computed", "short", [q("sum by (worker_pool) (rate(triptych_computed_tokens_total{%W}%R))", "{{worker_pool}} computed"), q("sum by (worker_pool) (rate(triptych_cached_prompt_tokens_total{%W}%R))", "{{worker_pool}} found")], "A second; found: keys and values that were there already."),
        ]),
    ])


def slo():
    left = "1 - triptych:{0}:ratio_rate3d{{%W}} / (1 - scalar(triptych:slo_objective:ratio))"
    burn = "triptych:{0}:ratio_rate{1}{{%W}} / (1 - scalar(triptych:slo_objective:ratio))"
    thresholds = [(1, ORANGE), (6, "semi-dark-orange"), (14.4, RED)]

    def budget(rule, what):
        return panel(f"Budget of three days: {what}", "percentunit", [q(left.format(rule), "left")], "Below zero: more than the objective allows.", kind="stat", thresholds=[(0, GREEN)])

    def burning(rule, what):
        return panel(f"Burn: {what}", "short", [q(burn.format(rule, window), window) for window in ("5m", "1h", "6h", "3d")],
                     "Times the rate that would use up exactly the budget. Pages at 14.4 over an hour and at 6 over six.", thresholds=thresholds)

    made = dashboard("triptych-slo", "Triptych: objectives", "Answers without a failure of ours, first tokens in time, and how fast the budget burns.", [
        ("Left", [budget("request_errors", "failures"), budget("late_first_tokens", "late first tokens"),
                  panel("Objective", "percentunit", [q("triptych:slo_objective:ratio", "of requests")], kind="stat")]),
        ("Burn", [burning("request_errors", "failures"), burning("late_first_tokens", "late first tokens")]),
        ("What fails", [panel("Failures of ours", "reqps", [q('sum by (outcome) (rate(triptych_requests_total{%W,component="proxy",outcome=~"unavailable|deadline_exceeded|internal|mismatch"}%R))', "{{outcome}}")], stack=True),
                        panel("First tokens within the bound", "percentunit", [q("1 - triptych:late_first_tokens:ratio_rate5m{%W}", "five minutes")], top=1)]),
    ])
    for one in made["panels"]:
        if one["type"] == "stat" and one["title"].startswith("Budget"):
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
        sys.exit(f"not as generate.py writes them: {', '.join(stale)}")


main()
