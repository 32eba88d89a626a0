"""The control loop: desired and observed state, the decision between them, and its effects."""
