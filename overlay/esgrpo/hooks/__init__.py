"""Every hook file, one behaviour each. Order is the order of application when a module carries several."""

HOOK_FILES: tuple[str, ...] = (
    "cpu.dist_name",
    "cpu.platform",
    "cpu.process_group",
    "cpu.checkpoint_engine",
    "cpu.linear",
    "cpu.save_to_cpu",
)
