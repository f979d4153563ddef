/* SPDX-License-Identifier: Apache-2.0
 *
 * The largest n of each scenario in test_faults.c: {name, driver calls, host allocations}.
 */
/* clang-format off */
{"create", 5, 5},
{"first_allocation", 11, 12},
{"grow_one_chunk", 10, 3},
{"grow_many_chunks", 35, 20},
{"small_and_large", 17, 9},
{"refusals", 37, 8},
{"cross_stream_reuse", 37, 5},
{"record_stream", 45, 6},
{"limit_reclaim", 45, 7},
{"lower_limit", 37, 2},
{"trim_wait", 37, 2},
{"trim_no_wait", 37, 2},
{"forget_stream", 9, 1},
{"return_unreturned", 10, 0},
{"close_idle", 43, 1},
{"close_live", 49, 1},
