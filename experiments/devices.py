"""GPUs as XLA's compiler is told about them: it compiles for those that are not there as well."""

from typing import NamedTuple


class Device(NamedTuple):
    """What the compiler is told about a GPU; sizes in bytes."""

    name: str
    capability: tuple[int, int]
    cores: int
    shared_a_core: int
    shared_a_block: int
    threads_a_core: int
    l2: int
    memory: int
    bytes_per_second: int
    gigahertz: float
    nvlinks: int

    @property
    def nominal_memory(self) -> int:
        """As many GB of 10^9 bytes as the card is said to have; it has 2^30 bytes for each."""
        return (self.memory >> 30) * 10**9

    @property
    def target_config(self) -> str:
        """Text of XLA's ``GpuTargetConfigProto``."""
        major, minor = self.capability
        # Mosaic compiles for sm_90a, sm_120a: what an architecture has alone.
        extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        links = f"device_interconnect_info {{ active_links: {self.nvlinks} }}" if self.nvlinks else ""
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
              core_count: {self.cores}
              shared_memory_per_core: {self.shared_a_core}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_a_block}
              threads_per_core_limit: {self.threads_a_core}
              threads_per_block_limit: 1024
              threads_per_warp: 32
              fpus_per_core: 128
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              thread_dim_limit_x: 1024
              thread_dim_limit_y: 1024
              thread_dim_limit_z: 64
              l2_cache_size: {self.l2}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bytes_per_second}
              clock_rate_ghz: {self.gigahertz}
              driver_version: "13.0.0"
              runtime_version: "12.8.0"
              {links}
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
        """


DEVICES = {
    "h200": Device("NVIDIA H200", (9, 0), 132, 233472, 232448, 2048, 50 << 20, 141 << 30, 4_800_000_000_000, 1.98, 18),
    "rtx6000pro": Device(
        "NVIDIA RTX PRO 6000 Blackwell",
        (12, 0),
        188,
        131072,
        101376,
        1536,
        128 << 20,
        96 << 30,
        1_792_000_000_000,
        2.6,
        0,
    ),
    "a100": Device("NVIDIA A100", (8, 0), 108, 167936, 166912, 2048, 40 << 20, 80 << 30, 2_039_000_000_000, 1.41, 12),
}
