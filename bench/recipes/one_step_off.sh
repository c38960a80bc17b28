#!/usr/bin/env bash
# GRPO that trains on the batch before. usage: [NAME=VALUE ...] bash bench/recipes/one_step_off.sh [OVERRIDE ...]
# Check it first: esgrpo lint bench/recipes/one_step_off.sh VERL=0.9.1 BACKEND=megatron --verl 0.9.1
# Segments need verl 0.9: the overlay has no place in the one-step-off main of any release, so there it is verl's v1
# trainer with separate replicas, one batch ahead and a weight sync every step.
set -euo pipefail
NAME=one-step-off
case "${VERL:-0.9.1}" in
    0.9.*) SEGMENT=${SEGMENT:-True} ;;
    *) SEGMENT=${SEGMENT:-False} ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

BATCH=${BATCH:-$MINI_BATCH}  # prompts a step

ARGS+=(data.train_batch_size=$BATCH trainer.test_freq=$TEST_FREQ)
if [ "$SEGMENT" = True ]; then
    MODULE=verl.trainer.main_ppo
    CONFIG=ppo_trainer
    [ "$BACKEND" = megatron ] && CONFIG=ppo_megatron_trainer
    ARGS+=(
        trainer.use_v1=True
        trainer.v1.trainer_mode=separate_async
        trainer.v1.separate_async.num_warmup_batches=1
        trainer.v1.separate_async.parameter_sync_step=1
        actor_rollout_ref.rollout.nnodes=$NNODES
        actor_rollout_ref.rollout.n_gpus_per_node=$ROLLOUT_DEVICES
        actor_rollout_ref.rollout.checkpoint_engine.backend=nccl
    )
else
    MODULE=verl.experimental.one_step_off_policy.main_ppo
    CONFIG=one_step_off_ppo_trainer
    [ "$BACKEND" = megatron ] && CONFIG=one_step_off_ppo_megatron_trainer
    [ "$VERL" = 0.7.0 ] && MODULE=recipe.one_step_off_policy.main_ppo
    ARGS+=(rollout.nnodes=$NNODES rollout.n_gpus_per_node=$ROLLOUT_DEVICES)
fi

exec "${LAUNCH[@]}" python3 -m $MODULE --config-path=config --config-name=$CONFIG "${ARGS[@]}" "$@"
