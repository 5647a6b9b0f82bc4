"""Which layout of a cluster trains a model fastest? Nothing is trained, and no GPU is needed.

Command:  python examples/plan_a_cluster.py [MODEL HARDWARE]     (default: llama3-8b h100x16)
Time:     10 s
Result:   the plan as it is in the configuration, which does not fit; the ten fastest layouts that
          do, by formulas; memory, communication and time of the first
"""

import sys

import maxmeg

model, hardware = sys.argv[1:] or ("llama3-8b", "h100x16")
config = maxmeg.config(model, **{"train.global_batch_size": 64})
naive = maxmeg.plan(config, hardware)
print(f"as configured: {naive.analytic.total / 2**30:.0f} GiB per GPU, fits: {naive.analytic.fits}")
best = maxmeg.plan(config, hardware, search=True)
print(best)
for choice in best.choices[:3]:
    print(f"{choice.layout}: {choice.analytic.total / 2**30:.0f} GiB per GPU")
