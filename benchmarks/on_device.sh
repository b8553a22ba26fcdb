#!/usr/bin/env bash
# Measure on this GPU or TPU what programs that are compiled without one do not tell.
#
#     benchmarks/on_device.sh [MINUTES] [FOLDER]       # 10, benchmarks/results/DEVICE
#
# The most wanted first. What the time is not enough for is left out, and named. A part
# that has begun is stopped when the time is up; its result is written when it ends.
# Needs `pip install -e '.[gpu,examples]'` (or tpu). On a CPU, it shows that it runs:
#
#     WIDTHS=256 ROUNDS=1 STEPS=1 benchmarks/on_device.sh 10 out
set -u
cd "$(dirname "$0")/.." || exit 1
PYTHON=${PYTHON:-python}
minutes=${1:-10}
folder=${2:-}
if [ -z "$folder" ]; then
    folder=$("$PYTHON" -c 'import jax
print(jax.devices()[0].device_kind.lower().replace(" ", "-"))') || exit 1
    folder=benchmarks/results/$folder
fi
mkdir -p "$folder"
SECONDS=0
failed=0
turns="--rounds ${ROUNDS:-10} --steps ${STEPS:-4}"

measure() { # of a name: a benchmark and its arguments
    local left=$((minutes * 60 - SECONDS)) name=$1
    shift
    if [ "$left" -le 0 ]; then
        echo "not measured, the time is up: $name"
        return
    fi
    echo "== $name ($left s left)"
    # shellcheck disable=SC2086 - turns are several arguments
    timeout "$left" "$PYTHON" -m "$@" $turns --out "$folder" || {
        failed=1
        echo "not measured, it failed or the time is up: $name"
    }
}

for width in ${WIDTHS:-1024 2048 4096}; do
    measure "fp8, width $width" benchmarks.train_step --model transformer \
        --width "$width" --dtype bfloat16 --dtype fp8
done
measure "ResNet-50, float16" benchmarks.train_step --model cnn --dtype float16
measure "ViT, float16" benchmarks.train_step --model vit --dtype float16
measure "transformer, with its mask" benchmarks.train_step --model transformer \
    --dtype bfloat16
measure "step_overhead" benchmarks.step_overhead --leaves 1 --leaves 16
echo "Results: $folder"
exit $failed
