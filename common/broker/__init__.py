"""How processes meet: registry, job queues and prefill tasks, over Redis or in memory. Nobody else speaks Redis."""
