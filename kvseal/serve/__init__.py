"""HTTP and text: OpenAI's API, tokenizer and chat template, limits and tenants, metrics, the offline `LLM`.

Never touches pages, weights or the scheduler: it hands `core.request.Request` to an engine and gets `core.events` back.
"""
