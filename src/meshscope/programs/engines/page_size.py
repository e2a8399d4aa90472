"""The page size of releases that leave it to vLLM: vllm/v1/attention/backends/pallas.py of vLLM 0.12."""

from typing import Any

SCALAR_MEMORY_BYTES = 1024 * 1024  # half of it may hold the page numbers, of four bytes each
LONG = 8192  # longer models get the smallest pages
MIN_PAGE, MAX_PAGE, PAGES = 16, 256, 16


class PallasAttentionBackend:
    """vLLM's rules, by the names that tpu-inference took over later."""

    @staticmethod
    def get_page_size(config: Any) -> int:
        """A sixteenth of the length that a sequence may have, within limits."""
        length = config.model_config.max_model_len
        if length > LONG:
            return MIN_PAGE
        rounded = 1 << (length - 1).bit_length()
        return min(MAX_PAGE, max(MIN_PAGE, rounded // PAGES))

    @staticmethod
    def get_min_page_size(config: Any) -> int:
        """The smallest power of two with which the page numbers of all sequences fit."""
        n_each = SCALAR_MEMORY_BYTES // 2 // config.scheduler_config.max_num_seqs // 4
        smallest = -(config.model_config.max_model_len // -n_each)
        return 1 << (smallest - 1).bit_length()
