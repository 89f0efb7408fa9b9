"""Fetches URLs, one per line of standard input, and answers each with a line of JSON.

A page of metrics is read by Prometheus' own parser, so that what it refuses fails the test.
"""

import http.client
import json
import sys
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status, response.headers.get("Content-Type"), response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Content-Type"), error.read().decode()


def answer(url):
    try:
        status, content_type, body = fetch(url)
    except (OSError, http.client.HTTPException) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    families = text_string_to_metric_families(body) if url.endswith("/metrics") else []
    return {
        "status": status,
        "content_type": content_type,
        "body": body,
        "families": [
            {
                "name": family.name,
                "type": family.type,
                "help": family.documentation,
                "samples": [[s.name, s.labels, s.value] for s in family.samples],
            }
            for family in families
        ],
    }


for line in sys.stdin:
    print(json.dumps(answer(line.strip())), flush=True)
