// Gradient of the weights of a 3x3x3 convolution with stride 1:
//
//     dw[o, i, kx, ky, kz] = sum over voxels v of x[v + k - before, i] * dy[v, o]
//
// A program goes along X over a column of 16 x 16 voxels, for 32 channels of x and 32 of dy. A plane of x, with
// the voxels around the column along Y and Z, is multiplied with three planes of dy. The rows of a product are the 32
// inputs of two taps (ky, kz), that is of two shifted views of the plane (the descriptor's leading offset is the
// distance between them). Its columns are the 32 outputs of three planes (kx = 2, 1, 0), its depth 16 voxels along Z.
// The nine taps are four pairs and a single one, which fills both halves of its product. Channels are contiguous, so
// both operands are transposed. The sums stay in registers for all of a program's work; they are written once, and
// added up over the programs elsewhere. The ring of dy's planes repeats its first two slots at its end, so that any
// three planes in succession are contiguous.

constexpr int THREADS = 384, LOADERS = 128;
constexpr int COLUMN = 16, ROWS = COLUMN + 2, ROW = COLUMN + 2;
constexpr int X_PLANE = ROWS * ROW * 64, X_SLOT = (X_PLANE + 1023) / 1024 * 1024, X_SLOTS = 4;
constexpr int DY_PLANE = COLUMN * COLUMN * 64, DY_SLOTS = 5;
constexpr int PAIRS = 5;

struct Arguments {
    Map x;      // with NORM; else the tensor map describes x
    Halo halo;  // with NORM
    Affine affine;
    float* sums;    // (programs, parts, PAIRS, 64, 96)
    int N, X, Y, Z; // of x, with its halo
    int before;     // planes of zeros before x and its halo
    int around;     // planes of the halo on each side
};

// Taps (ky, kz) of the five pairs: (0,0) (0,1), (1,0) (1,1), (2,0) (2,1), (0,2) (1,2), (2,2) (2,2).
__device__ constexpr int first_voxel(int pair) { return pair < 3 ? pair * ROW : pair == 3 ? 2 : 2 * ROW + 2; }
__device__ constexpr int pitch_of(int pair) { return pair < 3 ? 64 : pair == 3 ? ROW * 64 : 0; }
// With the 64-byte swizzle; groups of 8 voxels of the depth are 512 bytes apart.
__device__ constexpr u64 descriptor(int leading) {
    return 2ull << 62 | (u64)(512 >> 4) << 32 | (u64)(leading >> 4) << 16;
}

// The rings of planes of x and dy in shared memory, and their slots' barriers: full, and empty again.
struct Rings {
    u32 x, dy, x_full, x_empty, dy_full, dy_empty;
};

template <int FIRST, int COUNT>
__device__ __forceinline__ void multiply(const Arguments& g, const Rings& ring, float* sums, u32 begin, u32 end) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    float d[COUNT][48];
#pragma unroll
    for (int t = 0; t < COUNT; t++)
#pragma unroll
        for (int c = 0; c < 48; c++) clear(d[t][c]);
    int x_slot = 0, dy_slot = 0, awaited = 0;  // dy_slot: the first of three planes
    u32 x_phase = 0, dy_phase = 0;
    int x_before = -1, dy_before = -1;
    auto wait_for_dy = [&]() {
        wait_for(ring.dy_full + 8 * awaited, dy_phase);
        if (++awaited == DY_SLOTS) awaited = 0, dy_phase ^= 1;
    };
    for (u32 p = begin; p < end;) {
        const int count = min(g.X - p % g.X, end - p);
        wait_for_dy(), wait_for_dy();
        for (int i = 0; i < count; i++) {
            wait_for_dy();
            wait_for(ring.x_full + 8 * x_slot, x_phase);
            u32 a = (ring.x + x_slot * X_SLOT) >> 4, b = (ring.dy + dy_slot * DY_PLANE) >> 4;
            pin(a), pin(b);  // or the addresses of all products would be kept in registers
            products_begin();
#pragma unroll
            for (int k = 0; k < COLUMN; k++) {
#pragma unroll
                for (int t = 0; t < COUNT; t++) {
                    const int voxel = first_voxel(FIRST + t) + k * ROW;
                    multiply_add<1>(d[t], descriptor(pitch_of(FIRST + t)) | (a + (voxel * 64 >> 4)),
                                    descriptor(DY_PLANE) | (b + (k * COLUMN * 64 >> 4)));
                }
            }
            products_end();
            wait_for_products<1>();
            if (lane == 0 && x_before >= 0)
                arrive(ring.x_empty + 8 * x_before), arrive(ring.dy_empty + 8 * dy_before);
            x_before = x_slot, dy_before = dy_slot;
            if (++x_slot == X_SLOTS) x_slot = 0, x_phase ^= 1;
            if (++dy_slot == DY_SLOTS) dy_slot = 0;
        }
        wait_for_products<0>();
        if (lane == 0) {
            arrive(ring.x_empty + 8 * x_before);
            arrive(ring.dy_empty + 8 * dy_before);
            arrive(ring.dy_empty + 8 * dy_slot);
            arrive(ring.dy_empty + 8 * ((dy_slot + 1) % DY_SLOTS));
        }
        x_before = -1, dy_slot = (dy_slot + 2) % DY_SLOTS;
        p += count;
    }
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        float* at = sums + (FIRST + t) * 64 * 96 + (warp * 16 + lane / 4) * 96 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < 12; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) pin(d[t][4 * j + c]);
            *(float2*)(at + 8 * j) = make_float2(d[t][4 * j], d[t][4 * j + 1]);
            *(float2*)(at + 8 * 96 + 8 * j) = make_float2(d[t][4 * j + 2], d[t][4 * j + 3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
weights(const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap dy_map,
        const __grid_constant__ Arguments g, const int inputs, const int outputs) {
    extern __shared__ unsigned char memory[];
    Rings ring;
    ring.x = (shared_address(memory) + 1023) & ~1023u;
    ring.dy = ring.x + X_SLOTS * X_SLOT;
    ring.x_full = ring.dy + (DY_SLOTS + 2) * DY_PLANE, ring.x_empty = ring.x_full + 8 * X_SLOTS;
    ring.dy_full = ring.x_empty + 8 * X_SLOTS, ring.dy_empty = ring.dy_full + 8 * DY_SLOTS;
    [[maybe_unused]] const u32 table = ring.dy_empty + 8 * DY_SLOTS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < X_SLOTS; s++)
            init_barrier(ring.x_full + 8 * s, NORM ? LOADERS : 1), init_barrier(ring.x_empty + 8 * s, 8);
        for (int s = 0; s < DY_SLOTS; s++) init_barrier(ring.dy_full + 8 * s, 1), init_barrier(ring.dy_empty + 8 * s, 8);
    }
    barriers_are_ready();

    // A part is 32 channels of x and 32 of dy. The programs of all parts go side by side over the same planes.
    const int parts = inputs * outputs, part = blockIdx.x % parts;
    const int program = blockIdx.x / parts, programs = gridDim.x / parts;
    const int in_y = (g.Y + COLUMN - 1) / COLUMN, in_z = (g.Z + COLUMN - 1) / COLUMN;
    const u32 work = (u32)g.N * in_y * in_z * g.X;
    const u32 begin = (u32)((u64)work * program / programs), end = (u32)((u64)work * (program + 1) / programs);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    if (group == 2) {
        give_registers<NORM ? 128 : 40>();
        const int thread = threadIdx.x - 256, x_channel = part % inputs * 32, dy_channel = part / inputs * 32;
#if NORM
        NormalizedPlanes<ROWS, ROW, LOADERS, 1> planes(thread, ring.x, table);
#else
        if (thread) return;
#endif
        int x_slot = 0, dy_slot = 0;
        u32 x_phase = 1, dy_phase = 1;
        for (u32 p = begin; p < end;) {
            const int column = p / g.X, x = p % g.X, count = min(g.X - x, end - p);
            const int z = column % in_z * COLUMN, y = column / in_z % in_y * COLUMN, n = column / in_z / in_y;
#if NORM
            planes.begin(g.x, g.halo, g.affine, x_channel, n, x - g.around, y - 1, z - 1, g.X - 2 * g.around, g.Y, g.Z);
#endif
            for (int i = 0; i < count + 2; i++) {
                if (thread == 0) {
                    const u32 full = ring.dy_full + 8 * dy_slot;
                    const bool twice = dy_slot < 2;
                    wait_for(ring.dy_empty + 8 * dy_slot, dy_phase);
                    arrive_and_expect(full, twice ? 2 * DY_PLANE : DY_PLANE);
                    for (int slot = dy_slot; slot < DY_SLOTS + 2; slot += DY_SLOTS)
                        copy_plane(ring.dy + slot * DY_PLANE, &dy_map, dy_channel, z, y, x + g.before - 2 + i, n, full);
                    if (++dy_slot == DY_SLOTS) dy_slot = 0, dy_phase ^= 1;
                }
                if (i < 2) continue;
#if NORM
                planes.normalize(0, g.affine.slope);
                wait_for(ring.x_empty + 8 * x_slot, x_phase);
                planes.store(0, x_slot * X_SLOT, ring.x_full + 8 * x_slot);
#else
                wait_for(ring.x_empty + 8 * x_slot, x_phase);
                arrive_and_expect(ring.x_full + 8 * x_slot, X_PLANE);
                copy_plane(ring.x + x_slot * X_SLOT, &x_map, x_channel, z - 1, y - 1, x + i - 2, n, ring.x_full + 8 * x_slot);
#endif
                if (++x_slot == X_SLOTS) x_slot = 0, x_phase ^= 1;
            }
            p += count;
        }
    } else {
        take_registers<NORM ? 184 : 232>();
        float* sums = g.sums + ((i64)program * parts + part) * PAIRS * 64 * 96;
        if (group == 0) multiply<0, 3>(g, ring, sums, begin, end);
        else multiply<3, 2>(g, ring, sums, begin, end);
    }
}
