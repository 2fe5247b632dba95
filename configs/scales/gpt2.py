# OpenAI's GPT-2 124M: learned positions. With --init_from=hf:gpt2 it starts from its weights
# (pip install transformers), under any attention: SSMax (e) and (f) on a published model.
positions = "learned"
