"""An agent that is a program: it finds its prompt and its model in the environment, and knows nothing of who runs it."""

import json
import os
import sys
import urllib.request

question = json.load(sys.stdin)["question"]
messages = [{"role": "system", "content": os.environ["SYSTEM_PROMPT"]}, {"role": "user", "content": question}]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": messages}).encode(),
    {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
