// 3x3x3 convolution with stride 1, from 32 * HALVES channels to a multiple of 32.
//
// A program goes along X over a column of 16 x 16 voxels of Y and Z, for 32 channels of the result. Each plane of
// the input, with the voxels around the column along Y and Z, is loaded once and used once. A product multiplies a
// tile of 8 x 8 voxels, shifted by (ky, kz) through the address in its descriptor, by the weights of all three kx
// side by side (N = 96). So it adds to three planes of the result, each in a third of the registers. After input plane
// i the result's plane i - 2 is complete. Until then a plane stays in its third, so the order of kx changes with each
// input plane: the weights lie in shared memory as kx = 2 1 0 2 1, and an address picks three in a row.
//
// Two warpgroups multiply, each 8 rows along Y, in two tiles of 8 along Z; while one tile's products run, the tile
// before is stored. The weights' columns are permuted, so that a thread holds eight neighbouring channels: 16 bytes.
//
// EPILOGUE says what else happens to the result while it is in registers. 0: nothing. 1: its moments are taken. 2:
// another map is added, then moments are taken. 3: the result is the gradient of a map that was normalised before
// the convolution, and the sums are taken that the normalisation's gradient needs. Each warp has a row for moments or
// sums. Products follow the layouts of the PTX manual (wgmma); the marching scheme is this package's own.

#define MOMENTS (EPILOGUE == 1 || EPILOGUE == 2)
#define ADDS (EPILOGUE == 2)
#define SUMS (EPILOGUE == 3)

constexpr int GROUPS = 2, TILES = 2, LOADING_GROUPS = NORM ? 2 : 1;
constexpr int THREADS = 128 * (GROUPS + LOADING_GROUPS), LOADERS = 128 * LOADING_GROUPS;
constexpr int COLUMN_Y = 8 * GROUPS, COLUMN_Z = 8 * TILES;
constexpr int ROWS = COLUMN_Y + 2, ROW = COLUMN_Z + 2;
constexpr int PLANE = ROWS * ROW * 64;
constexpr int SLOT = (PLANE + 1023) / 1024 * 1024;
constexpr int SLOTS = HALVES == 1 ? 5 : 2;  // as many as fit beside the weights
constexpr int WEIGHTS = 9 * 4 * 160 * 16;   // for 32 input channels: (tap, chunk, kx and column, 8 channels)

// Registers of a thread that loads and of one that multiplies: in all at most those of the launch, or it would hang.
constexpr int AT_LAUNCH = 65536 / THREADS / 8 * 8;
constexpr int LOADS_WITH = NORM ? 96 : 40;
constexpr int MULTIPLIES_WITH = (AT_LAUNCH * (GROUPS + LOADING_GROUPS) - LOADS_WITH * LOADING_GROUPS) / GROUPS / 8 * 8;

// Descriptors of a and b. Upper words: the offset between groups of 8 rows, and the swizzle. Upper halves of the lower
// words: the leading offset.
constexpr u32 A_HIGH = (ROW * 64) >> 4 | 2u << 30, A_MIDDLE = 1u << 16;
constexpr u32 B_HIGH = 128 >> 4, B_MIDDLE = (160 * 16) >> 4 << 16;

struct Arguments {
    Map x;      // with NORM; else the tensor map describes x
    Halo halo;  // with NORM
    Affine affine;
    const void* weights;
    Map y;
    Map other;       // ADDS: the map that is added; SUMS: the map that was normalised
    float* rows;     // with EPILOGUE: (8 * programs of a part, 4 or 2, N, channels of the result), zeros
    int N, X, Y, Z;  // of the input
    int made;        // planes of the result
    int before;      // planes of zeros before the input
};

// Products of 32 channels of a tile with the weights; a and b are descriptors' lower words: address / 16 | MIDDLE.
template <int THIRD>
__device__ __forceinline__ void multiply(float (&d)[48], u32 a, u32 b) {
#pragma unroll
    for (int tap = 0; tap < 9; tap++) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int from_a = ((tap / 3 * ROW + tap % 3) * 64 + k * 32) >> 4;
            const int from_b = ((tap * 4 + k * 2) * 160 * 16 + (2 - THIRD) * 512) >> 4;
            multiply_add<0>(d, (u64)A_HIGH << 32 | (a + from_a), (u64)B_HIGH << 32 | (b + from_b));
        }
    }
}

// The moments or sums of 8 channels of a sample over a thread's voxels; at its end, they go to the warp's row.
struct Tally {
#if MOMENTS
    float shift[8];  // a value of each channel; subtracting it first saves digits
    int count;
#elif SUMS
    float scale[8], level[8], mean[8];  // subtracting the mean first saves digits
#endif
    float one[8], two[8];

    __device__ __forceinline__ void begin(const Arguments& g, int sample, int channel) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            one[c] = two[c] = 0.f;
#if SUMS
            load_affine(g.affine, sample, channel + c, scale[c], level[c]);
            mean[c] = g.affine.mean[2 * ((i64)sample * g.affine.channels + channel + c)];
#endif
        }
#if MOMENTS
        count = -1;
#endif
    }

    // Takes the channels of two voxels, a and b; SUMS: x_a and x_b are the normalisation's input there.
    __device__ __forceinline__ void add(
        const float (&a)[8], const float (&b)[8], const float (&x_a)[8], const float (&x_b)[8], bool in_a, bool in_b,
        float slope) {
#if MOMENTS
        if (count < 0 && __shfl_sync(~0u, in_a, 0)) {  // the first voxel of a tile is in the volume if any is
            count = 0;
#pragma unroll
            for (int c = 0; c < 8; c++) shift[c] = __shfl_sync(~0u, a[c], threadIdx.x & 3);
        }
        count += (int)in_a + (int)in_b;
        if (in_a) take(a);
        if (in_b) take(b);
#elif SUMS
        if (in_a) take(a, x_a, slope);
        if (in_b) take(b, x_b, slope);
#endif
    }

    // Few instructions, because they share the registers' ports with the products in flight.
#if MOMENTS
    __device__ __forceinline__ void take(const float (&y)[8]) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float away = y[c] - shift[c];
            one[c] += away, two[c] = fmaf(away, away, two[c]);
        }
    }
#elif SUMS
    __device__ __forceinline__ void take(const float (&dy)[8], const float (&x)[8], float slope) {
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float g = fmaf(x[c], scale[c], level[c]) > 0.f ? dy[c] : dy[c] * slope;
            one[c] += g, two[c] = fmaf(g, x[c] - mean[c], two[c]);
        }
    }
#endif

    // Adds up the numbers of a warp's threads, and writes them to the warp's row.
    __device__ __forceinline__ void end(const Arguments& g, int row, int sample, int channel, int channels) {
        const int lane = threadIdx.x % 32;
#if MOMENTS
        float number = (float)max(count, 0);
#endif
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) {
#if MOMENTS
            number += __shfl_xor_sync(~0u, number, apart);
#endif
#pragma unroll
            for (int c = 0; c < 8; c++) {
                one[c] += __shfl_xor_sync(~0u, one[c], apart);
                two[c] += __shfl_xor_sync(~0u, two[c], apart);
            }
        }
        if (lane >= 4) return;
        const i64 line = (i64)g.N * channels;
        [[maybe_unused]] float* out = g.rows + row * (MOMENTS ? 4 : 2) * line + (i64)sample * channels + channel;
#pragma unroll
        for (int c = 0; c < 8; c++) {
#if MOMENTS
            const float away = number > 0.f ? one[c] / number : 0.f;
            out[c] = number;
            out[line + c] = number > 0.f ? fmaxf(two[c] / number - away * away, 0.f) : 0.f;
            out[2 * line + c] = number > 0.f ? shift[c] : 0.f;
            out[3 * line + c] = away;
#elif SUMS
            const i64 column = (i64)sample * channels + channel + c;
            out[c] = one[c];
            out[line + c] = (two[c] - one[c] * g.affine.mean[2 * column + 1]) * g.affine.rstd[column];
#endif
        }
    }
};

// What a warpgroup multiplies: its accumulators, and its position in the ring of planes and in the result.
struct Multiplier {
    const Arguments& g;
    const u32 ring, full, empty;  // ring: lower word of a descriptor; full, empty: barriers
    const u32 weights;
    const int warp, lane;
    float d[TILES][48];
    Tally tally;
    int slot = 0, before = -1;
    u32 phase = 0;
    // In the current column: memory of this thread's voxels in plane -2 of the program's planes.
    unsigned short* y;
    const unsigned short* other;
    uint4 read[TILES][2];  // of the other map, for the next tiles to finish
    int planes;            // of the input, for this column
    bool in[TILES][2];

    __device__ __forceinline__ Multiplier(const Arguments& g, u32 ring_, u32 weights_, u32 full, u32 empty, int group)
        : g(g), ring((ring_ + 64 * 8 * group * ROW) >> 4 | A_MIDDLE), full(full), empty(empty),
          weights(weights_ >> 4 | B_MIDDLE), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ void begin_column(int sample, int x, int count, int y0, int z0, int channel) {
        planes = count + 2;
        const int y_ = y0 + warp * 2, z_ = z0 + lane / 4;  // two rows for each of eight warps
        y = g.y.data + sample * g.y.sample + (i64)(x - 2) * g.y.x + (i64)y_ * g.y.y + (i64)z_ * g.y.z + channel;
#if ADDS || SUMS
        other = g.other.data + sample * g.other.sample + (i64)(x - 2) * g.other.x + (i64)y_ * g.other.y +
                (i64)z_ * g.other.z + channel;
#endif
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            in[t][0] = y_ < g.Y && z_ + 8 * t < g.Z, in[t][1] = y_ + 1 < g.Y && z_ + 8 * t < g.Z;
#pragma unroll
            for (int c = 0; c < 48; c++) clear(d[t][c]);
            look_ahead(t, 2);
        }
    }

    template <int THIRD>
    __device__ __forceinline__ void issue(int tile, int half) {
        u32 from = ring + slot * (SLOT >> 4) + (64 * 8 * tile >> 4), by = weights + half * (WEIGHTS >> 4);
        pin(from), pin(by);  // or the addresses of all products would be kept in registers
        products_begin();
        multiply<THIRD>(d[tile], from, by);
        products_end();
    }

    __device__ __forceinline__ void release() {
        if (lane == 0 && before >= 0) arrive(empty + 8 * before);
    }

    // Reads the other map for the tile that is finished after input plane i, a plane ahead: memory is slow.
    __device__ __forceinline__ void look_ahead(int tile, int i) {
#if ADDS || SUMS
        const unsigned short* at = other + i * g.other.x + 8 * tile * g.other.z;
        if (i < planes && in[tile][0]) read[tile][0] = *(const uint4*)at;
        if (i < planes && in[tile][1]) read[tile][1] = *(const uint4*)(at + g.other.y);
#endif
    }

    // Stores the third of a tile that input plane i completes, if it is one of the program's planes, and clears it.
    template <int THIRD>
    __device__ __forceinline__ void finish(int tile, int i) {
        constexpr int o = THIRD * 16;
        float(&r)[48] = d[tile];
#pragma unroll
        for (int c = 0; c < 16; c++) pin(r[o + c]);
        if (i >= 2) {
            // The layout of a product: columns 8 j + 2 (lane % 4) and the next; rows lane / 4 and lane / 4 + 8.
            float a[8], b[8];
#pragma unroll
            for (int c = 0; c < 8; c++) a[c] = r[o + c / 2 * 4 + c % 2], b[c] = r[o + c / 2 * 4 + c % 2 + 2];
            [[maybe_unused]] float x_a[8], x_b[8];
#if ADDS || SUMS
            unpack(read[tile][0], x_a), unpack(read[tile][1], x_b);
            look_ahead(tile, i + 1);
#endif
#if ADDS
#pragma unroll
            for (int c = 0; c < 8; c++) a[c] += x_a[c], b[c] += x_b[c];
#endif
            unsigned short* at = y + i * g.y.x + 8 * tile * g.y.z;
            if (in[tile][0])
                *(uint4*)at = make_uint4(pack(a[0], a[1]), pack(a[2], a[3]), pack(a[4], a[5]), pack(a[6], a[7]));
            if (in[tile][1])
                *(uint4*)(at + g.y.y) = make_uint4(pack(b[0], b[1]), pack(b[2], b[3]), pack(b[4], b[5]), pack(b[6], b[7]));
#if EPILOGUE
            tally.add(a, b, x_a, x_b, in[tile][0], in[tile][1], g.affine.slope);
#endif
        }
#pragma unroll
        for (int c = 0; c < 16; c++) clear(r[o + c]);
    }

    // Multiplies input plane i of a column. While a tile's products run, the tile before is finished; first the last
    // tile of plane i - 1.
    template <int THIRD>
    __device__ __forceinline__ void step(int i) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            wait_for(full + 8 * slot, phase);
            issue<THIRD>(0, half);
            wait_for_products<1>();
            release();
            if (half == 0) finish<THIRD>(TILES - 1, i - 1);
#pragma unroll
            for (int t = 1; t < TILES; t++) {
                issue<THIRD>(t, half);
                if (half == HALVES - 1) {
                    wait_for_products<1>();
                    finish<(THIRD + 1) % 3>(t - 1, i);
                }
            }
            before = slot;
            if (++slot == SLOTS) slot = 0, phase ^= 1;
        }
    }

    // Finishes the last tile of input plane i, which ends a column.
    template <int THIRD>
    __device__ __forceinline__ void end_column(int i) {
        wait_for_products<0>();
        release();
        before = -1;
        finish<(THIRD + 1) % 3>(TILES - 1, i);
    }

    // Makes a column's planes of the result; the input has two more.
    __device__ __forceinline__ void column() {
        for (int i = 0;;) {
            step<0>(i);
            if (++i == planes) return end_column<0>(i - 1);
            step<1>(i);
            if (++i == planes) return end_column<1>(i - 1);
            step<2>(i);
            if (++i == planes) return end_column<2>(i - 1);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
convolution(const __grid_constant__ TensorMap map, const __grid_constant__ Arguments g, const int parts) {
    extern __shared__ unsigned char memory[];
    const u32 ring = (shared_address(memory) + 1023) & ~1023u;
    const u32 weights = ring + SLOTS * SLOT, full = weights + HALVES * WEIGHTS;
    const u32 empty = full + 8 * SLOTS, loaded = empty + 8 * SLOTS;
    [[maybe_unused]] const u32 table = loaded + 16;
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; s++) {
            init_barrier(full + 8 * s, NORM ? LOADERS : 1);
            init_barrier(empty + 8 * s, 4 * GROUPS);
        }
        init_barrier(loaded, 1);
    }
    barriers_are_ready();

    // A part is 32 channels of the result. The programs of all parts go side by side over the same planes.
    const int part = blockIdx.x % parts, program = blockIdx.x / parts, programs = gridDim.x / parts;
    const int in_y = (g.Y + COLUMN_Y - 1) / COLUMN_Y, in_z = (g.Z + COLUMN_Z - 1) / COLUMN_Z;
    const u32 work = (u32)g.N * in_y * in_z * g.made;
    const u32 begin = (u32)((u64)work * program / programs), end = (u32)((u64)work * (program + 1) / programs);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    if (group >= GROUPS) {
        give_registers<LOADS_WITH>();
        const int thread = threadIdx.x - 128 * GROUPS;
        if (thread == 0) {
            arrive_and_expect(loaded, HALVES * WEIGHTS);
            copy_bytes(weights, (const char*)g.weights + (i64)part * HALVES * WEIGHTS, HALVES * WEIGHTS, loaded);
        }
#if NORM
        NormalizedPlanes<ROWS, ROW, LOADERS, HALVES> planes(thread, ring, table);
#else
        if (thread) return;
#endif
        int slot = 0;
        u32 phase = 1;
        for (u32 p = begin; p < end;) {
            const int column = p / g.made, x = p % g.made - g.before, count = min(g.made - p % g.made, end - p);
            const int z = column % in_z * COLUMN_Z - 1, y = column / in_z % in_y * COLUMN_Y - 1;
            const int n = column / in_z / in_y;
#if NORM
            planes.begin(g.x, g.halo, g.affine, 0, n, x, y, z, g.X, g.Y, g.Z);
#endif
            for (int i = 0; i < count + 2; i++) {
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
#if NORM
                    planes.normalize(half, g.affine.slope);
                    wait_for(empty + 8 * slot, phase);
                    planes.store(half, slot * SLOT, full + 8 * slot);
#else
                    wait_for(empty + 8 * slot, phase);
                    arrive_and_expect(full + 8 * slot, PLANE);
                    copy_plane(ring + slot * SLOT, &map, half * 32, z, y, x + i, n, full + 8 * slot);
#endif
                    if (++slot == SLOTS) slot = 0, phase ^= 1;
                }
            }
            p += count;
        }
    } else {
        take_registers<MULTIPLIES_WITH>();
        Multiplier with(g, ring, weights, full, empty, group);
        const int channel = part * 32 + with.lane % 4 * 8;
        [[maybe_unused]] const int row = program * 4 * GROUPS + with.warp;
        [[maybe_unused]] int sample = -1;
        wait_for(loaded, 0);
        for (u32 p = begin; p < end;) {
            const int column = p / g.made, x = p % g.made, count = min(g.made - x, end - p);
            const int n = column / in_z / in_y;
#if EPILOGUE
            if (n != sample) {
                if (sample >= 0) with.tally.end(g, row, sample, channel, parts * 32);
                with.tally.begin(g, n, channel);
            }
#endif
            sample = n;
            with.begin_column(n, x, count, column / in_z % in_y * COLUMN_Y, column % in_z * COLUMN_Z, channel);
            with.column();
            p += count;
        }
#if EPILOGUE
        if (sample >= 0) with.tally.end(g, row, sample, channel, parts * 32);
#endif
    }
}
