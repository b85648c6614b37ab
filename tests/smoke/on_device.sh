#!/usr/bin/env bash
# A GPU that is rented for fifteen minutes: two calls, which fit into them with both starts.
#
#     OUT=FOLDER tests/smoke/on_device.sh [first] [second]      default: both
#
# Each stage has a limit of its own, in seconds (times $SLOWER, for a slow machine), and neither a failure nor the limit of one keeps the
# next from running. All is written below $OUT: results, row by row, in the folder of the device, and a log of each stage. Packages that
# the machine lacks are taken from wheels in .wheels, if that is there; $FUNCOPS_REVISION names the commit where git is missing. Exits
# with 1 if a stage failed, or had not enough time.
set -u
cd "$(dirname "$0")/../.." || exit 2
PYTHON=${PYTHON:-python3}
OUT=${OUT:?a folder to write to}
mkdir -p "$OUT/logs" && OUT=$(cd "$OUT" && pwd) || exit 2
unset TRITON_INTERPRET # what a device is asked, Triton's interpreter would answer
SUMMARY=()

stage() { # NAME SECONDS COMMAND...
  local name=$1 limit=$(($2 * ${SLOWER:-1})) began=$SECONDS rc said
  shift 2
  echo "== $name, at most $limit s: $*"
  timeout --kill-after 2 "$limit" "$@" > >(tee -a "$OUT/logs/$name.log") 2> >(tee -a "$OUT/logs/$name.log" >&2)
  rc=$?
  case $rc in
  0) said="done" ;;
  124 | 137) said="out of time" FAILED=1 ;;
  *) said="failed, exit code $rc" FAILED=1 ;;
  esac
  SUMMARY+=("$name: $said, $((SECONDS - began)) of $limit s")
  echo "== ${SUMMARY[-1]}"
}

bench() { # NAME SECONDS BENCH ARGUMENTS...
  stage "$1" "$2" "$PYTHON" -m benchmarks "$3" --if-device "${@:4}"
}

kernels() { # SECONDS OWN: in the order of what a user runs by default, without those that have a row in their present form
  bench kernels "$1" kernels --seconds "$2" --changed "$RESULTS/kernels.json" --json "$RESULTS/kernels.json" \
    --providers funcops torch liger cublas flash cudnn funcops_cudnn --jobs 8
}

first() { # kernels that never ran come first, a profile before the compiler, and last what runs by request and may hang the device
  stage smoke 65 "$PYTHON" tests/smoke/run.py --seconds 60 --json "$RESULTS/smoke.jsonl"
  kernels 58 45
  bench step 75 step --device cuda --part eager --profile --seconds 60 --json "$RESULTS/step-cuda.json"
  bench step-compiled 102 step --device cuda --part compiled --seconds 90 --json "$RESULTS/step-compiled.json"
  bench graph 28 graph --json "$RESULTS/graph.json"
  stage gpu-tests 88 "$PYTHON" tests/smoke/gpu_tests.py --seconds 70 --json "$RESULTS/gpu-tests.jsonl"
  stage opt-in 24 "$PYTHON" tests/smoke/run.py --opt-in --jobs 1 --seconds 22 --json "$RESULTS/smoke.jsonl"
}

second() { # after a mend: what failed, then what the first call had no time for
  stage gpu-tests 35 "$PYTHON" tests/smoke/gpu_tests.py --seconds 18 --json "$RESULTS/gpu-tests.jsonl"
  kernels 70 56
  bench step-again 40 step --device cuda --part eager --seconds 30 --json "$RESULTS/step-again.json"
  bench recipes 20 recipes --json "$RESULTS/recipes.json"
}

FAILED=0
packages=$OUT/packages
if compgen -G '.wheels/*.whl' >/dev/null; then # beside the machine's own packages, which stay as they are
  each='for wheel in .wheels/*.whl; do "$0" -m pip install -q --no-index --no-deps --target "$1" "$wheel" || echo "without $wheel"; done'
  stage wheels 10 bash -c "$each" "$PYTHON" "$packages"
  export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH}
fi
stage needs 10 "$PYTHON" tests/smoke/needs.py
RESULTS=$(timeout $((10 * ${SLOWER:-1})) "$PYTHON" tests/smoke/results.py "$OUT") || exit 2
[ $# -gt 0 ] || set -- first second
for call in "$@"; do
  case $call in first | second) "$call" ;; *) echo "$0: first or second, got $call" >&2 && exit 2 ;; esac
done
stage unconfirmed 20 "$PYTHON" -m benchmarks unconfirmed --rows --results "$RESULTS"
rm -rf "$packages"
printf '%s\n' "results are in $RESULTS" "${SUMMARY[@]}"
exit $FAILED
