"""Run by vLLM's Python: answers batches of requests by an engine with the connector, and no server before it.

Standard input has {"model", "store", "options", "batches"}; a request is {"ids", "memory", "save", "sampling", "lora"}.
A line of standard output has {"answers": [[{"tokens", "reason", "params", "cached"}]], "preemptions"}.
"""

import json
import sys


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    given = json.load(sys.stdin)
    transfer = KVTransferConfig(
        kv_connector="GistConnector",
        kv_connector_module_path="gistkit_vllm.connector",
        kv_role="kv_consumer",
        kv_connector_extra_config={"store": given["store"], "save": given["save"]},
    )
    llm = LLM(
        given["model"], enforce_eager=True, dtype="float32", disable_log_stats=False, kv_transfer_config=transfer,
        **{"max_model_len": 1024, **given["options"]},
    )  # fmt: skip
    answers = []
    for batch in given["batches"]:
        prompts = [TokensPrompt(prompt_token_ids=request["ids"]) for request in batch]
        settings = []
        for request in batch:
            params = {name: request[name] for name in ("memory", "save") if name in request}
            extra = {"kv_transfer_params": params} if params else {}
            options = {"temperature": 0, "max_tokens": 24, **request.get("sampling", {})}
            settings.append(SamplingParams(extra_args=extra, **options))
        paths = [request.get("lora") for request in batch]
        loras = [path and LoRARequest(path, 1 + sum(map(ord, path)), path) for path in paths]
        answers.append([])
        for output in llm.generate(prompts, settings, use_tqdm=False, lora_request=loras):
            one = {"tokens": list(output.outputs[0].token_ids), "reason": output.outputs[0].finish_reason}
            answers[-1].append({**one, "params": output.kv_transfer_params, "cached": output.num_cached_tokens})
    preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    print("\n" + json.dumps({"answers": answers, "preemptions": preemptions}), flush=True)


if __name__ == "__main__":
    main()
