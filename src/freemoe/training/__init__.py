"""What is trained by gradients: one loop with its states and looks, schedules, straight-through choices, distillation."""
