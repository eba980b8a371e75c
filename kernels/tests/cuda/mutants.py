"""Plants faults in the CUDA kernels, one at a time, and shows which test catches each.

    python3 kernels/tests/cuda/mutants.py            # all; prints a table
    python3 kernels/tests/cuda/mutants.py decode     # those whose source or fault has this word

The table is kept in README.md beside this file. A fault that no test catches makes the script end with 1.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
SOURCES = ROOT / "kernels/src/cuda"

# (source, fault, code, code with the fault, tests)
MUTANTS = [
    ("attention.cuh", "no barrier before a tile is used", "    sync_block();\n    if (tile + 1", "    if (tile + 1", "attention"),
    ("attention.cuh", "a tile is used before its copies are waited for", "    copy_async_wait<0>();\n", "", "attention"),
    ("attention.cuh", "the next tile takes the place of this one", "bf16* to = tiles + (tile & 1)", "bf16* to = tiles + (tile & 0)", "attention"),
    ("attention.cuh", "rows beyond the last query are written", "    if (i >= n_queries) continue;\n", "", "attention"),
    ("attention.cuh", "key heads in the wrong order", "head / (heads.n_heads / heads.n_kv_heads), n_keys", "head % heads.n_kv_heads, n_keys", "attention"),
    ("attention.cuh", "the first row of the sequence is forgotten", "out + uint64_t{first_row + i} * out_stride", "out + uint64_t{i} * out_stride", "attention"),
    ("attention.cuh", "the last tile of keys is left out", "div_up(static_cast<uint32_t>(end), kKeys)", "static_cast<uint32_t>(end) / kKeys", "attention"),
    ("attention.cuh", "a window begins a tile too late", "/ kKeys;\n  int n_tiles", "/ kKeys + 1;\n  int n_tiles", "attention"),
    ("tile.cuh", "one row beyond the last key is read", "bool is_there = first + r < n_rows;", "bool is_there = first + r <= n_rows;", "attention"),
    ("tile.cuh", "columns beyond the head are read", "bool is_in = is_there && column < width;", "bool is_in = is_there;", "attention"),
    ("tile.cuh", "halves of a fragment of keys swapped", "uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};\n      mma_bf16(scores", "uint32_t first[2] = {b[1], b[0]}, second[2] = {b[2], b[3]};\n      mma_bf16(scores", "attention"),
    ("tile.cuh", "values are not transposed", "load_matrices_transposed(b", "load_matrices(b", "attention"),
    ("tile.cuh", "matrices of values in the wrong order", "const bf16* row = v + (lane % 8 + (matrix & 1 ? 8 : 0)) * kPitch<D> + (matrix & 2 ? 8 : 0);", "const bf16* row = v + (lane % 8 + (matrix & 2 ? 8 : 0)) * kPitch<D> + (matrix & 1 ? 8 : 0);", "attention"),
    ("tile.cuh", "rows of a tile four elements too near", "kPitch = D + 8", "kPitch = D + 4", "attention"),
    ("softmax.cuh", "a shuffle short in the maximum", "      top = fmaxf(top, shuffle_xor(top, 2));\n", "", "attention"),
    ("softmax.cuh", "the sum is not rescaled", "sum[half] = sum[half] * factor + weights;", "sum[half] = sum[half] + weights;", "attention"),
    ("softmax.cuh", "every second column is not rescaled", "        out[n][2 * half + 1] *= factor;\n", "", "attention"),
    ("softmax.cuh", "a lane's sum is taken for the row's", "      sum[half] += shuffle_xor(sum[half], 2);\n", "", "attention"),
    ("scores.cuh", "causal mask off by one", "int last = position(query) + 1;", "int last = position(query) + 2;", "attention"),
    ("scores.cuh", "window off by one", "int first = position(query) - window + 1;", "int first = position(query) - window;", "attention"),
    ("scores.cuh", "bias of rows beyond the last query", "query >= n_queries || ", "", "attention"),
    ("scores.cuh", "a row that sees no key", "return largest == -INFINITY ? 0.0f : largest;", "return largest;", "attention"),
    ("scores.cuh", "bias table one entry off", "bias[clamped + max_distance]", "bias[clamped + max_distance + 1]", "attention"),
    ("scores.cuh", "bias of the first sequence for all", "b.values + b.offsets[seq] +", "b.values + b.offsets[0] +", "attention"),
    ("scores.cuh", "ALiBi of keys after the query", "distance < 0 ? -distance : distance)", "-distance)", "attention"),
    ("keys.cuh", "block table of the first sequence for all", "sequences.table_start[seq] + i / kPageTokens", "i / kPageTokens", "attention"),
    ("keys.cuh", "place in a page", "head, i % kPageTokens);", "head, i % (kPageTokens - 1));", "attention"),
    ("attention_f32.cu", "a tile is filled while others read it", "    sync_block();\n    for (uint32_t i = threadIdx.x; i < kF32Keys", "    for (uint32_t i = threadIdx.x; i < kF32Keys", "attention"),
    ("attention_f32.cu", "weights are read before they are written", "    weights[lane] = weight;\n    sync_warp();", "    weights[lane] = weight;", "attention"),
    ("decode.cu", "all warps take the same keys", "split * kSplitKeys + warp * kWarpKeys", "split * kSplitKeys", "attention"),
    ("decode.cu", "a tile is filled while lanes read it", "    // All lanes are done with the tile before it is written again.\n    sync_warp();\n", "", "attention"),
    ("decode.cu", "keys are used before they are there", "    copy_async_wait<1>();\n    sync_warp();\n", "", "attention"),
    ("decode.cu", "values are used before they are there", "    copy_async_wait<0>();\n    sync_warp();\n", "", "attention"),
    ("decode.cu", "parts take the tiles' place too early", "  sync_block();\n  auto* found", "  auto* found", "attention"),
    ("decode.cu", "a warp's part is not rescaled", "out += from[column] * factor;", "out += from[column];", "attention"),
    ("decode.cu", "the last split is left out", "div_up(sequences.seq_lens[seq], kSplitKeys)", "sequences.seq_lens[seq] / kSplitKeys", "attention"),
    ("decode.cu", "heads of a group in the wrong order", "(kv_head * group + i % group) * heads.head_dim", "(kv_head * group + i / n_queries) * heads.head_dim", "attention"),
    ("decode.cu", "a shared split has the queries of another", "queries = shared.queries + 3 * at[1];", "queries = shared.queries;", "sharing"),
    ("decode.cu", "rows of a shared split see the keys of the first", "keys.n_keys(at[0]), at[1]", "n_keys, at[1]", "sharing"),
    ("decode.cu", "splits of a row on one another", "* n_splits + split;", "* n_splits;", "attention"),
    ("pages.cuh", "heads of a page on one another", "(uint64_t{head} * kPageTokens + token)", "(uint64_t{head} + token)", "cache"),
    ("rope.cu", "a sign of the rotation", "a * cos - b * sin", "a * cos + b * sin", "cache"),
    ("rope.cu", "values of one projection are rotated", "is_value ? to_f32(from[e]) : rotated(from, e, token, rotation)", "rotated(from, e, token, rotation)", "cache"),
    ("rope.cu", "what pads a head is not written", "uint32_t row = pages.n_kv_heads * pages.head_stride;", "uint32_t row = pages.n_kv_heads * head_dim;", "cache"),
    ("reduce.cuh", "scratch is used again too early", "  sync_block();\n  return sum;", "  return sum;", "norm"),
    ("norm.cu", "the mean is not taken off", "(to_f32(a.value[i]) - mean) * factor", "to_f32(a.value[i]) * factor", "norm"),
    ("norm.cu", "the sum is not kept", "      store_pack<N>(sum + row + column, a);\n", "", "norm"),
    ("each.cuh", "one vector too many", "i < n; i += uint64_t", "i <= n; i += uint64_t", "rows"),
    ("rows.cu", "vectors at addresses that are not theirs", " && by_vectors<T>(start)", "", "rows"),
    ("transpose.cu", "no barrier between writing and reading a tile", "  sync_block();\n", "", "rows"),
    ("transpose.cu", "bound of the other axis", "if (row < width && column < t)", "if (row < t && column < width)", "rows"),
    ("fragments.cuh", "no barrier before the warps are joined", "  sync_block();\n  float sum = 0;", "  float sum = 0;", "linear"),
    ("fragments.cuh", "scales of upper and lower outputs swapped", "float low = to_f32(scale[0]), high = to_f32(scale[8]);", "float low = to_f32(scale[8]), high = to_f32(scale[0]);", "linear"),
    ("fragments.cuh", "inputs beyond the last are read", "if (row && i < n_in) both", "if (row) both", "linear"),
    ("fragments.cuh", "one warp's inputs are taken twice", "sum += parts[w * kOutputs", "sum += parts[w / 2 * 2 * kOutputs", "linear"),
    ("experts.cu", "equals go to the last expert", "other == best && other_expert < best_expert", "other == best && other_expert > best_expert", "experts"),
    ("experts.cu", "an expert is chosen twice", "chosen |= 1u << best_expert / kWarp", "chosen |= 0u << best_expert / kWarp", "experts"),
    ("experts.cu", "ranks are those of the scores", "rank += shuffle(expert, static_cast<int>(other)) < expert;", "rank += other < lane;", "experts"),
    ("experts.cu", "counts of a warp are used again too early", "      routes.places[pair] = place;\n    }\n    sync_block();\n", "      routes.places[pair] = place;\n    }\n", "experts"),
    ("experts.cu", "places of earlier warps are forgotten", "      if (w < warp) place += in_warp[w];\n", "", "experts"),
    ("experts.cu", "tiles that are not needed are left undefined", "expert + 1 == r.n_experts ? n_tiles : tile + own", "tile + own", "experts"),
    ("experts.cu", "rows of another expert are in a tile", "count - done < kTokens ? count - done : kTokens", "kTokens", "experts"),
    ("experts.cu", "a row of a place is taken for a token's", "g.is_by_token ? g.order[place] / g.top_k : place", "g.order[place] / g.top_k", "experts"),
    ("experts.cu", "weights by place instead of by pair", "float weight = routes.weights[pair];", "float weight = routes.weights[routes.places[pair]];", "experts"),
    ("recurrent.cu", "rows before the step are forgotten", "return row < kept ? state[uint64_t{row} * channels] :", "return row < kept ? 0.0f :", "recurrent"),
    ("recurrent.cu", "a row too old is kept", "= value(n + row);", "= value(n + row - 1);", "recurrent"),
    ("recurrent.cu", "every block of a sequence replaces its state", "  if (first > 0) return;\n", "", "recurrent"),
    ("recurrent.cu", "padding has a slot", "return slots[seq] == 0xffffffffu;", "return seq > seq;", "recurrent"),
    ("recurrent.cu", "padding is left undefined", "is_in && t < end; t += kParts", "is_in && t < first; t += kParts", "recurrent"),
    ("recurrent.cu", "keys of the first head for all", "head / (heads.n_heads / heads.n_key_heads)", "0 * head", "recurrent"),
    ("recurrent.cu", "vectors go on behind the last key", "bool is_in = i < heads.key_dim;", "bool is_in = true;", "recurrent"),
    ("recurrent.cu", "queries are too long", " / sqrtf(static_cast<float>(heads.key_dim));", ";", "recurrent"),
    ("recurrent.cu", "the known value has not decayed", "beta * (v - decay * of_k)", "beta * (v - of_k)", "recurrent"),
    ("recurrent.cu", "a row lacks its own token", "return decay * of_q + product * delta;", "return decay * of_q;", "recurrent"),
    ("recurrent.cu", "a lane's sum is taken for the column's", "  of_q = column_sum(of_q);\n", "", "recurrent"),
    ("recurrent.cu", "tokens are read before they are there", "heads, head, warp);\n    sync_block();\n", "heads, head, warp);\n", "recurrent"),
    ("recurrent.cu", "tokens are replaced while others read them", "from_f32<T>(sum);\n    }\n    sync_block();\n", "from_f32<T>(sum);\n    }\n", "recurrent"),
    ("recurrent.cu", "columns behind the last of a head are written", "if (is_in && part == 0)", "if (part == 0)", "recurrent"),
    ("recurrent.cu", "the state is not kept", "if (has(i)) value(i) = state[i];", "if (has(i)) value(i) = value(i);", "recurrent"),
    ("conv.cu", "padding on the wrong side", "place[axis] * stride[axis] - padding[axis]", "place[axis] * stride[axis] + 0 * padding[axis]", "conv"),
    ("conv.cu", "strides of the axes swapped", "at[axis] += place[axis] * stride[axis]", "at[axis] += place[axis] * stride[1 - axis]", "conv"),
    ("stored_rows.cu", "exponent of E4M3 off by one", "(exponent + 127 - 10) << 23", "(exponent + 127 - 9) << 23", "stored_rows"),
    ("stored_rows.cu", "a NaN is lost in the scale", "largest = magnitude <= largest ? largest : magnitude;", "largest = magnitude > largest ? magnitude : largest;", "stored_rows"),
    ("choose.cu", "equals go to the last token", "uint64_t key = uint64_t{ordered(logit)} << 32 | (0xffffffffu - i);", "uint64_t key = uint64_t{ordered(logit)} << 32 | i;", "choose"),
    ("choose.cu", "counts are not cleared for all", "    scratch[threadIdx.x] = 0;\n    sync_block();\n", "    scratch[threadIdx.x] = 0;\n", "choose"),
    ("choose.cu", "the descent stops one bin early", "found.above + scratch[digit] < target", "found.above + scratch[digit] <= target", "choose"),
    ("choose.cu", "top-k is not seen by the nucleus", "return ordered(row[i]) >= least ? expf", "return true ? expf", "choose"),
    ("choose.cu", "the draw is one token late", "before + scratch[owner] <= place", "before + scratch[owner] < place", "choose"),
    ("choose.cu", "minus infinity is counted as a best", "if (row[i] != -INFINITY && k < before", "if (k < before", "choose"),
]


def binary():
    """The tests, built."""
    command = ["cargo", "test", "-p", "triptych-kernels", "--test", "cuda", "--no-run", "--message-format=json"]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    messages = [json.loads(line) for line in lines]
    found = [m["executable"] for m in messages if m.get("executable") and m["target"]["name"] == "cuda"]
    return found[-1]


def verdict(run):
    """The test that failed first, and how."""
    if "g++ refuses" in run.stdout + run.stderr:
        sys.exit("a fault that does not compile:\n" + run.stdout[-2000:])
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", run.stdout, re.M)
    if not failed and run.returncode != 0:
        return "the test process", f"ends with {run.returncode}"
    if not failed:
        return None, ""
    faults = re.findall(r"^kernel (?!misuse)\S+ block[^:]*: (.*)$", run.stderr + run.stdout, re.M)
    if faults:
        how = re.sub(r"0x[0-9a-f]+", "…", faults[0])
        how = re.sub(r"\S*/", "", how)
    else:
        how = "wrong values"
    return failed[0], how


def main():
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    tests, missed, rows = binary(), [], []
    for source, fault, code, planted, filter_ in MUTANTS:
        if word not in source and word not in fault:
            continue
        text = (SOURCES / source).read_text()
        if text.count(code) < 1:
            sys.exit(f"{source} has no {code!r}")
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder) / "cuda"
            shutil.copytree(SOURCES, place, ignore=shutil.ignore_patterns("built"))
            (place / source).write_text(text.replace(code, planted))
            environment = dict(os.environ, TRIPTYCH_CUDA_SOURCES=str(place), RUST_BACKTRACE="0")
            run = subprocess.run(
                [tests, filter_ + "::"], cwd=ROOT / "kernels", env=environment, text=True, capture_output=True, timeout=1200
            )
        test, how = verdict(run)
        if test is None:
            missed.append(f"{source}: {fault}")
        row = f"| `{source}` | {fault} | {f'`{test}`' if test else '**missed**'} | {how[:110]} |"
        rows.append(row)
        print(row, flush=True)
    print(f"{len(rows) - len(missed)} of {len(rows)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
