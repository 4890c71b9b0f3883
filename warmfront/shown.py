"""What `up` shows a person to type: how to ask the cluster, and how to call warmfront itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def examples(http: str, model: str, *, asks_for_certificates: bool) -> list[str]:
    """How to ask a cluster, with curl and from Python; which files a client takes for TLS only the reader knows."""
    hints, curl, tls, client, names = [], "", "", "", "OpenAI"
    if http.startswith("https:"):
        hints = ["  CA stands for the file of the authority that you believe; WARMFRONT_CA names it to `warmfront`."]
        curl, tls = " --cacert CA", 'import ssl; tls = ssl.create_default_context(cafile="CA"); '
        client, names = ", http_client=DefaultHttpxClient(verify=tls)", "DefaultHttpxClient, OpenAI"
    if asks_for_certificates:
        hints += ["  CERT and KEY are what you show yourself, by --tls-client-ca: WARMFRONT_CERT and WARMFRONT_KEY."]
        curl += " --cert CERT --key KEY"
        tls += 'tls.load_cert_chain("CERT", "KEY"); '
    ask = f'model="{model}", max_tokens=64, temperature=0, messages=[{{"role": "user", "content": "Hello!"}}]'
    return [
        *([*hints, ""] if hints else []),
        f"  curl{curl} {http}/v1/chat/completions -H 'content-type: application/json' \\",
        f"""    -d '{{"model": "{model}", "max_tokens": 64, "temperature": 0, """
        """"messages": [{"role": "user", "content": "Hello!"}]}'""",
        "",
        "  pip install openai",
        f"  python -c '{tls}from openai import {names}; "
        f'client = OpenAI(base_url="{http}/v1", api_key="none"{client}); '
        f"print(client.chat.completions.create({ask}).choices[0].message.content)'",
    ]


def typed_command() -> str:
    """How a person types ``warmfront`` here: its path, from this folder if it is below, where PATH does not have it."""
    script = Path(sys.executable).with_name("warmfront")
    found = shutil.which("warmfront")
    if found is not None and (not script.exists() or Path(found).samefile(script)):
        return "warmfront"
    if not script.exists():
        return f"{sys.executable} -m warmfront"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)
