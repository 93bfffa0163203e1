"""REINFORCE in torch on CartPole-v1; its rollouts are DSec sessions."""
