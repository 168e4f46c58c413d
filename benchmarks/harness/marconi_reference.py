"""Reference integers of Marconi's simulator on our four traces: the reused tokens, which an independent implementation
found first and this one found, too. COMPAT is the published behaviour, REPAIRED ours (`state_tree.Defects`).

Capacities are in units of 10**9 bytes. Where `Case.vllm_plus` is None, vLLM+ is not checked.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from benchmarks.workloads.hybrid_traces import Shape

BOOTSTRAP = MappingProxyType({"lmsys": 15, "sharegpt": 5, "swebench": 5, "rag": 5})
"""The paper's window for tuning alpha, as a multiple of the lookups until the first eviction."""

SIZE_GB = MappingProxyType({"lmsys": 2, "sharegpt": 1, "swebench": 10, "rag": 2})


class Tuned(NamedTuple):
    """The tokens that Marconi reuses, the alpha that it chooses, and at which request's insertion; None: never."""

    reused: int
    alpha: float = 0.0
    tuned_at: int | None = None


class Case(NamedTuple):
    """One trace and capacity with COMPAT. None: not known."""

    trace: str
    capacity_gb: int
    vllm_plus: int | None
    sglang_plus: int
    marconi: Tuned


CASES = (
    Case("lmsys", 2, 249_886, 836_177, Tuned(698_740, 1.4, 539)),
    Case("sharegpt", 1, 20_969, 143_081, Tuned(152_290, 2.0, 124)),
    Case("swebench", 10, 1_010_661, 2_107_206, Tuned(2_287_417, 1.9, 599)),
    Case("rag", 2, 104_608, 330_165, Tuned(386_390, 1.2, 79)),
    Case("lmsys", 4, None, 1_773_083, Tuned(1_723_502, 0.0, 1_094)),  # `tuned_at` is what this implementation found
    Case("lmsys", 8, None, 3_031_479, Tuned(3_068_792)),
    Case("sharegpt", 2, None, 382_883, Tuned(325_128, 1.5, 249)),
    Case("sharegpt", 4, None, 716_330, Tuned(772_799, 0.2, 509)),
    Case("swebench", 30, None, 3_793_633, Tuned(3_957_245)),
)

REPAIRED_CASES = MappingProxyType(
    {
        "lmsys": Tuned(723_676, 2.0),
        "sharegpt": Tuned(146_727, 0.1),
        "swebench": Tuned(1_834_209, 0.4),
        "rag": Tuned(392_194, 0.7),
    }
)

SINGLE_REPAIRS = MappingProxyType(
    {
        "lmsys": {
            "mlp": Tuned(701_329, 1.2),
            "memory": Tuned(698_510, 1.7),
            "freed": Tuned(697_729, 1.4),
            "match": Tuned(698_740, 1.4),
        },
        "sharegpt": {
            "mlp": Tuned(147_566, 0.1),
            "memory": Tuned(152_483, 0.3),
            "freed": Tuned(160_894, 2.0),
            "match": Tuned(152_290, 2.0),
        },
        "swebench": {
            "mlp": Tuned(2_251_623, 1.6),
            "memory": Tuned(2_430_640, 0.0),
            "freed": Tuned(2_236_543, 1.9),
            "match": Tuned(2_287_417, 1.9),
        },
    }
)
"""Reuse with all defects but the named one."""


class Inside(NamedTuple):
    """A cache's state at the end of a run; `saved`: operations, to seven digits."""

    clock: int
    nodes: int
    tokens: int
    saved: float


INSIDE = MappingProxyType(
    {
        ("lmsys", "sglang_plus"): Inside(5_529, 5, 27_640, 1.135752e16),
        ("lmsys", "marconi"): Inside(5_524, 4, 28_670, 9.537823e15),
        ("lmsys", "vllm_plus"): Inside(5_935, 432, 13_820, 3.456824e15),
        ("sharegpt", "sglang_plus"): Inside(4_929, 5, 10_228, 1.889196e15),
        ("sharegpt", "marconi"): Inside(4_981, 4, 12_210, 2.015892e15),
        ("sharegpt", "vllm_plus"): Inside(5_144, 121, 3_846, 2.771267e14),
        ("swebench", "sglang_plus"): Inside(4_101, 76, 119_103, 2.815029e16),
        ("swebench", "marconi"): Inside(4_092, 25, 135_743, 3.052690e16),
        ("swebench", "vllm_plus"): Inside(4_469, 347, 11_096, 1.328710e16),
        ("rag", "sglang_plus"): Inside(2_225, 21, 19_690, 4.357361e15),
        ("rag", "marconi"): Inside(2_324, 14, 24_790, 5.111952e15),
        ("rag", "vllm_plus"): Inside(2_399, 82, 2_593, 1.378802e15),
    }
)

FIRST_EVICTION = MappingProxyType({"lmsys": 36, "sharegpt": 25, "swebench": 120, "rag": 16})
"""Marconi's lookups until its first eviction."""

CURVES = MappingProxyType(
    {
        "lmsys": (
            *(816_502, 838_780, 839_872, 830_708, 850_421, 851_947, 863_058, 870_137, 875_295, 871_099, 844_822),
            *(686_323, 695_147, 660_151, 680_243, 665_301, 693_377, 700_651, 697_336, 698_870, 693_697),
        ),
        "sharegpt": (
            *(139_763, 148_772, 140_718, 142_171, 144_432, 149_850, 159_872, 163_202, 171_695, 163_551, 148_281),
            *(135_693, 158_815, 140_066, 144_905, 160_988, 150_843, 155_220, 154_826, 157_589, 155_913),
        ),
        "swebench": (
            *(2_430_640, 2_558_966, 2_519_139, 2_447_940, 2_418_643, 2_346_484, 2_337_641, 2_415_341, 2_264_318),
            *(2_256_151, 2_219_984, 1_975_666, 1_629_418, 1_659_731, 2_145_338, 1_722_180, 1_634_435, 1_634_434),
            *(1_634_404, 1_551_889, 1_573_816),
        ),
    }
)
"""Reused tokens by a static alpha of 0, 0.1 … 2."""

RETUNED_HITS = MappingProxyType(
    {
        "lmsys": {100: 0.1677, 200: 0.1537},
        "sharegpt": {100: 0.1124, 200: 0.1043},
        "swebench": {100: 0.2954, 200: 0.2845},
        "rag": {100: 0.3606, 200: 0.3760},
    }
)
"""Hit rates if alpha is tuned again every so many requests."""

RETUNED_ALPHAS_OF_LMSYS = (1.8, 1.4, 1.2, 0.4, 1.6, 2.0, 0.2, 1.2, 0.8, 1.0, 1.0, 0.4, 1.2, 0.2)
"""The alphas chosen when tuned every 100 requests."""


class Profiled(NamedTuple):
    """For an unbounded cache: the reused tokens, the checkpoints per request, and, of the requests with at least 256
    tokens computed before, the share that reuse nothing. The last two are rounded."""

    reused: int
    written: float
    in_vain: float


PROFILES = MappingProxyType(
    {
        "vllm_align_528": (
            Profiled(4_280_496, 0.59, 0.061),
            Profiled(1_081_344, 0.28, 0.163),
            Profiled(3_676_464, 1.38, 0.001),
            Profiled(745_008, 0.87, 0.026),
        ),
        "vllm_align_528_without_junctions": (
            Profiled(4_280_496, 0.59, 0.061),
            Profiled(1_081_344, 0.28, 0.163),
            Profiled(1_840_080, 1.18, 0.004),
            Profiled(679_536, 0.87, 0.108),
        ),
        "vllm_align_1056": (
            Profiled(3_911_424, 0.32, 0.201),
            Profiled(795_168, 0.12, 0.481),
            Profiled(3_389_760, 1.11, 0.035),
            Profiled(555_456, 0.61, 0.354),
        ),
        "vllm_all_528": (
            Profiled(4_280_496, 0.72, 0.061),
            Profiled(1_081_344, 0.28, 0.163),
            Profiled(3_795_792, 7.77, 0.0),
            Profiled(766_656, 1.06, 0.0),
        ),
        "sglang_no_buffer": (
            Profiled(4_644_998, 2.0, 0.012),
            Profiled(1_388_244, 2.0, 0.0),
            Profiled(2_090_286, 2.0, 0.035),
            Profiled(0, 2.0, 1.0),
        ),
        "sglang_extra_buffer": (
            Profiled(4_489_344, 2.07, 0.001),
            Profiled(1_281_600, 1.62, 0.0),
            Profiled(3_927_168, 2.40, 0.001),
            Profiled(871_296, 1.49, 0.040),
        ),
        "marconi": (
            Profiled(4_651_866, 1.02, 0.0),
            Profiled(1_392_898, 1.02, 0.0),
            Profiled(3_978_750, 1.76, 0.001),
            Profiled(889_589, 1.23, 0.0),
        ),
    }
)
"""What engines reuse, by their rule for checkpoints, on lmsys, sharegpt, swebench and rag."""

CREDITED = MappingProxyType(
    {"lmsys": (4_643_072, 1_365), "sharegpt": (1_384_080, 1_076), "swebench": (4_089_488, 1_120), "rag": (927_648, 576)}
)
"""Tokens that a router credits if it knows only attention, and requests with at least 256 tokens computed before."""


class Wider(NamedTuple):
    """`hits`: rounded hit rates of vLLM+, SGLang+, Marconi, and with the best static alpha, which is 0.1 in both."""

    shape: Shape
    capacity_gb: int
    bootstrap: int
    hits: tuple[float, float, float, float]
    alpha: float


WIDER = (
    Wider(Shape("lmsys", 0.5, 100), 5, 5, (0.0651, 0.4751, 0.4705, 0.4773), 0.1),
    Wider(Shape("swebench", 0.25, 100, 5), 5, 5, (0.1122, 0.1369, 0.1367, 0.1373), 0.0),
)
"""Cases of a wider sweep, whose window is five times the lookups until the first eviction for all sets."""

STATIC_OF_WIDER = 0.1
