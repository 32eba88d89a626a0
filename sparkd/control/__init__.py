"""The control loop: desired and observed state, the plan between them, and its effects."""
