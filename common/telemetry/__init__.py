"""What a process tells about itself: log lines, spans, metrics, health. Never prompts, never outputs."""
