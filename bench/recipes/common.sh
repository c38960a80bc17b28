# Defaults that all recipes share; sourced by them. Every name in capitals can be set in the environment.
# The result is the array ARGS and the array LAUNCH (what starts python).

VERL=${VERL:-0.9.1}          # 0.7.0 0.7.1 0.8.0 0.9.0 0.9.1
case "$VERL" in
    0.7.0 | 0.7.1 | 0.8.0 | 0.9.0 | 0.9.1) ;;
    *)
        echo "esgrpo: VERL: $VERL | wanted one of 0.7.0 0.7.1 0.8.0 0.9.0 0.9.1 | nothing was started |" \
            "set VERL to the release that is installed" >&2
        exit 2
        ;;
esac
DEVICE=${DEVICE:-gpu}        # gpu npu
BACKEND=${BACKEND:-fsdp2}    # fsdp2 megatron
NNODES=${NNODES:-1}
TRAIN_DEVICES=${TRAIN_DEVICES:-2}      # a node, for the trainer
ROLLOUT_DEVICES=${ROLLOUT_DEVICES:-2}  # a node, for vLLM
DATA=${DATA:-$HOME/data}               # bench/recipes/prepare_data.py writes there
MODEL=${MODEL:-$HOME/models/Qwen2.5-0.5B-Instruct}
TRAIN_FILE=${TRAIN_FILE:-$DATA/gsm8k/train.parquet}
TEST_FILE=${TEST_FILE:-$DATA/gsm8k/test.parquet}
RUN_DIR=${RUN_DIR:-$HOME/runs/$NAME-$VERL-$BACKEND-$DEVICE}

MAX_PROMPT=${MAX_PROMPT:-2048}
MAX_RESPONSE=${MAX_RESPONSE:-8192}
RESPONSES=${RESPONSES:-8}      # a prompt
MINI_BATCH=${MINI_BATCH:-64}   # prompts an optimiser step
MICRO_BATCH=${MICRO_BATCH:-2}  # rows a device, where batches are not sized by tokens
EPOCHS=${EPOCHS:-10}
TEST_FREQ=${TEST_FREQ:-20}
TRAIN_TP=${TRAIN_TP:-1}
TRAIN_PP=${TRAIN_PP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-1}
SEGMENT_LENGTH=${SEGMENT_LENGTH:-1024}
PROFILE=${PROFILE:-elastic}        # of the overlay, with verl 0.9; 0.7.0 has segments and the rule for loops
FLASH_ATTN=${FLASH_ATTN:-True}     # False: PyTorch's attention and verl's fused log-probs, as on the measured machines

TOKENS=$((MAX_PROMPT + MAX_RESPONSE))

ARGS=(
    data.train_files="$TRAIN_FILE"
    data.val_files="$TEST_FILE"
    data.prompt_key=prompt
    data.truncation=left
    data.max_prompt_length=$MAX_PROMPT
    data.max_response_length=$MAX_RESPONSE
    data.return_raw_chat=True
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10.0
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=10
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.ppo_mini_batch_size=$MINI_BATCH
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=$MICRO_BATCH
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((TOKENS * 2))
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=$MICRO_BATCH
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=$((TOKENS * 2))
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=$RESPONSES
    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=$MICRO_BATCH
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$((TOKENS * 2))
    actor_rollout_ref.rollout.tensor_model_parallel_size=$ROLLOUT_TP
    actor_rollout_ref.rollout.gpu_memory_utilization=0.7
    actor_rollout_ref.rollout.enable_chunked_prefill=True
    actor_rollout_ref.rollout.max_num_batched_tokens=$TOKENS
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.top_p=1.0
    actor_rollout_ref.rollout.top_k=-1
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.n=1
    trainer.logger=[console,tensorboard]
    trainer.project_name=es-grpo
    trainer.experiment_name="$NAME-$VERL-$BACKEND-$DEVICE"
    trainer.default_local_dir="$RUN_DIR"
    trainer.val_before_train=False
    trainer.save_freq=-1
    trainer.resume_mode=auto
    trainer.total_epochs=$EPOCHS
    trainer.nnodes=$NNODES
    trainer.n_gpus_per_node=$TRAIN_DEVICES
)

if [ "$BACKEND" = megatron ]; then
    ARGS+=(
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TRAIN_TP
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$TRAIN_PP
        actor_rollout_ref.ref.megatron.tensor_model_parallel_size=$TRAIN_TP
        actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=$TRAIN_PP
        actor_rollout_ref.actor.optim.lr_decay_style=constant
    )
else
    ARGS+=(
        actor_rollout_ref.actor.strategy=fsdp2
        critic.strategy=fsdp2
        actor_rollout_ref.model.use_remove_padding=$FLASH_ATTN
        actor_rollout_ref.model.enable_gradient_checkpointing=True
    )
    if [ "$FLASH_ATTN" = False ]; then
        ARGS+=(
            +actor_rollout_ref.model.override_config.attn_implementation=sdpa
            actor_rollout_ref.model.use_fused_kernels=True
            actor_rollout_ref.model.fused_kernel_options.impl_backend=torch
        )
    fi
fi

# Not run on an NPU: checked against the configuration of each release only.
if [ "$DEVICE" = npu ]; then
    export VLLM_ASCEND_ENABLE_NZ=0 HCCL_EXEC_TIMEOUT=60000 HCCL_CONNECT_TIMEOUT=7200
    ARGS+=(trainer.device=npu actor_rollout_ref.rollout.enforce_eager=True)
    if [ "$BACKEND" = megatron ]; then
        # the reference policy takes over the actor's; without it MindSpeed asks for a micro_batch_size
        ARGS+=(+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True)
    else
        ARGS+=(actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.ref.use_torch_compile=False)
    fi
fi

LAUNCH=()
if [ "$SEGMENT" = True ]; then
    LAUNCH=(esgrpo run --)
    ARGS+=(+actor_rollout_ref.rollout.segment.segment_length=$SEGMENT_LENGTH)
    if [ "$VERL" = 0.7.0 ]; then
        ARGS+=(
            +actor_rollout_ref.rollout.segment.enable=True
            +actor_rollout_ref.rollout.segment.prune.repetition.enable=True
        )
    else
        ARGS+=(+actor_rollout_ref.rollout.segment.profile=$PROFILE)
    fi
fi
