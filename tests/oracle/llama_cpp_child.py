"""Read a GGUF file by llama.cpp and print greedy tokens and the log-probabilities of the first one.

Arguments: the file, the prompt's tokens and the number of new tokens, both as JSON.
"""

import json
import sys
import urllib.request

import xllamacpp

path, prompt, count = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
settings = xllamacpp.CommonParams()
settings.model.path = path
settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.port = 256, 1, 0, 0
settings.cpuparams.n_threads, settings.warmup, settings.verbosity = 1, False, -1
settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(settings)
request = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "n_probs": 300}
request |= {"ignore_eos": True, "cache_prompt": False, "return_tokens": True}
body, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
call = urllib.request.Request(server.listening_address + "/completion", body, headers)
answer = json.load(urllib.request.urlopen(call))
steps = answer.get("completion_probabilities", [])  # none for tokens that end within a character
first = {item["id"]: item["logprob"] for item in steps[0]["top_logprobs"]} if steps else {}
print(json.dumps({"tokens": answer["tokens"], "first": sorted(first.items())}))
