// Arguments of the attention kernels; runtime/attention.py has the same structs, and a test compares their sizes.
#pragma once

namespace signpost {

struct SideParams {
    const unsigned char* heads;     // [pages][h_kv][HEAD_BYTES]
    const unsigned char* records;   // [pages][RECORD_BYTES]
    const unsigned char* segments;  // [segments][h_kv][SEGMENT_BYTES]
    const int* table;               // page ids [b][table_stride]
    const void* sinks;              // Model [b][SINKS][h_kv][D]
    const void* window;             // Model [b][capacity][h_kv][D], token n behind the sinks at n % capacity; at least RECENT + T - 1 and the new ones
    const float* values;            // codebook [2^BITS]
    const unsigned char* bands;     // Band (bands.cuh) [h_kv][D / 32]
    const float* scale;             // [h_kv][D], also zero, mean
    const float* zero;
    const float* mean;
    long long table_stride;
    long long capacity;
};

struct AttendParams {
    SideParams key, value;
    const void* q;        // Model, strides below in numbers
    const float* projected;  // what cuda/project.cuh made of it, where keys are rotated or sketched, unless blocks do it (Layout::PROJECTS)
    const uint4* rotation;   // with the same matrix as there
    const uint4* restoring;  // and P inverted as MergeParams::fragments, where blocks multiply results by it (Layout::RESTORES)
    void* out;            // Model, strides below in numbers: of what no merge has to add up (Layout::DIRECT)
    float* partial;       // [row tiles][places + 2 b h_kv][ROWS][D + 2]: output before division, maximum (base 2), sum; places: blocks, or (blocks + h_kv) * warps that are alone
    int* ranges;          // [b h_kv][2]: first and last block, or warp, that has a result of a sequence's kv head; (1, 0): it is in `out`
    const int* lengths;   // [b] cached tokens, the new ones included
    const int* offsets;   // [b] position of token 0
    const uint4* turns;   // what turns keys by tokens' places, and first operands of turned zero points (runtime/turns.py): [heads][tiles][STEPS][3][32]
    const float* inv_freq;
    const unsigned char* functions;  // u8: what runtime/smooth.py makes, which ByteLayout begins with
    long long q_sequence, q_token, q_head;
    long long out_sequence, out_token, out_head;
    long long turns_head;  // from one head's to the next, 0 if all have the same
    double of_all, of_aligned;  // a block's share of the line: where all take part, and where they are aligned
    int aligned, whole;         // then so many take part: as many for each of the b h_kv heads, of which a block has one at most (whole: 1), or each has so many heads, the last one maybe fewer
    float rope_scaling;
    float scale;  // of scores, times log2(e)
    int b, h_kv, g, m;
    int follows;  // the kernel before wrote nothing but newest tokens, or added up partial results, and all that came before it, or before the attention it belongs to, has been awaited
    int window;   // where SLIDING: how many of the newest tokens a query sees, itself included
    float cap, bend;  // where CAPPED: scores x become c * tanh(x / c); c * log2(e), and 2 / c
};

}  // namespace signpost
