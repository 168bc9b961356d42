"""What rewrites schedules, each as a pass of its own."""
