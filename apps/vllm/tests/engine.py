"""Run by vLLM's Python: answers batches of requests by an engine with the connector, and no server before it.

Standard input has {"model", "store", "options", "batches"}; a request is {"ids", "memory", "sampling"}. A line of
standard output has {"answers": [[{"tokens", "reason"}]], "preemptions"}.
"""

import json
import sys


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.inputs import TokensPrompt

    given = json.load(sys.stdin)
    transfer = KVTransferConfig(
        kv_connector="GistConnector",
        kv_connector_module_path="gistkit_vllm.connector",
        kv_role="kv_consumer",
        kv_connector_extra_config={"store": given["store"]},
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
            extra = {} if "memory" not in request else {"kv_transfer_params": {"memory": request["memory"]}}
            options = {"temperature": 0, "max_tokens": 24, **request.get("sampling", {})}
            settings.append(SamplingParams(extra_args=extra, **options))
        outputs = [output.outputs[0] for output in llm.generate(prompts, settings, use_tqdm=False)]
        answers.append([{"tokens": list(one.token_ids), "reason": one.finish_reason} for one in outputs])
    preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    print("\n" + json.dumps({"answers": answers, "preemptions": preemptions}), flush=True)


if __name__ == "__main__":
    main()
