// What the hand-written convolutions share: barriers, copies, matrix products, and loads that normalise.
//
// Maps are (N, C, X, Y, Z) in channels-last memory. A program takes 32 channels at a time: a plane of Y x Z voxels
// lies in shared memory as a row of 64 bytes for each voxel. The number of a 16-byte piece in its row is XORed with
// bits 1 and 2 of the row's number (the 64-byte swizzle of the copy engine and of the matrix units).
//
// FLOAT16: 1 if maps and weights are float16, 0 if bfloat16. NORM: 1 if the input x is normalised while it is
// loaded, else 0.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct __align__(64) TensorMap { u64 opaque[16]; };

// ------------------------------------------------------------------------------------ barriers and copies
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
}

// Copies a tensor map's box, 32 channels of one plane, to shared memory; voxels outside the volume are zeros.
__device__ __forceinline__ void copy_plane(
    u32 to, const TensorMap* map, int channel, int z, int y, int x, int sample, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(map), "r"(channel), "r"(z), "r"(y), "r"(x), "r"(sample), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// --------------------------------------------------------------------------------------- matrix products
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups of products are in flight.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#if FLOAT16
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 "
#else
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
#endif

// Adds the product of 64 x 16 and 16 x 96 values, which lie in shared memory where the descriptors a and b say, to
// 64 x 96 sums in the registers of a warpgroup. TRANSPOSED: the 64 and the 96 values are contiguous in memory, not
// the 16 (MN-major instead of K-major).
template <int TRANSPOSED>
__device__ __forceinline__ void multiply_add(float (&d)[48], u64 a, u64 b) {
    asm volatile(
        PRODUCT
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47}, %48, %49, 1, 1, 1, %50, %50;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        : "l"(a), "l"(b), "n"(TRANSPOSED));
}

// Opaque to the compiler, which may then neither move the values across a fence or a wait nor copy them: otherwise
// it would run the products one after the other.
__device__ __forceinline__ void clear(float& x) { asm volatile("mov.b32 %0, 0;" : "=f"(x)::"memory"); }
__device__ __forceinline__ void pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void pin(u32& x) { asm volatile("" : "+r"(x)); }

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ------------------------------------------------------------------------------------- numbers of 16 bits
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
#if FLOAT16
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}

__device__ __forceinline__ void unpack(u32 both, float& low, float& high) {
#if FLOAT16
    asm("{\n.reg .f16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high) : "r"(both));
#else
    low = __uint_as_float(both << 16), high = __uint_as_float(both & 0xffff0000u);
#endif
}

__device__ __forceinline__ void unpack(const uint4& eight, float (&x)[8]) {
    unpack(eight.x, x[0], x[1]), unpack(eight.y, x[2], x[3]), unpack(eight.z, x[4], x[5]), unpack(eight.w, x[6], x[7]);
}

// ----------------------------------------------------------------------------------------- normalisation
// A normalisation and its LeakyReLU: weight and bias of each channel, mean (as two numbers) and 1 / deviation
// of each sample and channel.
struct Affine {
    const float *weight, *bias, *mean, *rstd;
    int channels;
    float slope;
};

// Before LeakyReLU a normalised channel is value * scale + shift.
__device__ __forceinline__ void load_affine(const Affine& g, int sample, int channel, float& scale, float& shift) {
    const i64 column = (i64)sample * g.channels + channel;
    scale = g.weight[channel] * g.rstd[column];
    shift = g.bias[channel] - g.mean[2 * column] * scale - g.mean[2 * column + 1] * scale;
}

// A map in memory; strides count elements.
struct Map {
    unsigned short* data;
    i64 sample, x;
    int y, z;
};

// The planes before and behind a map that is a slab, in the map's layout; null: zeros.
struct Halo {
    const unsigned short *before, *behind;
    i64 sample;
};

// Loads planes of HEIGHT x WIDTH voxels and 32 channels, and normalises them; voxels outside the volume are zeros.
// Each of LOADING threads has 8 channels of some voxels. A plane is loaded into registers and normalised there while
// its slot in shared memory is still in use. PIECES: groups of 32 channels of each plane.
template <int HEIGHT, int WIDTH, int LOADING, int PIECES>
struct NormalizedPlanes {
    static constexpr int VOXELS = HEIGHT * WIDTH, STEP = LOADING / 4, COUNT = (VOXELS + STEP - 1) / STEP;
    uint4 loaded[COUNT];
    int offset[COUNT];
    u32 inside;  // bit k: voxel k is in the volume; a thread loads any voxel for the others, and stores zeros
    const unsigned short *volume, *before, *behind;
    i64 pitch;
    int sample = -1, first, quarter, x, X;
    u32 to, table;   // shared memory: this thread's place in a slot; scale and shift of each of the sample's channels
    float by[4][4];  // scale and shift of this thread's 8 channels, two channels in a row

    __device__ __forceinline__ NormalizedPlanes(int thread, u32 ring, u32 table) : table(table) {
        quarter = thread & 3, first = thread >> 2;
        to = ring + first * 64 + ((quarter ^ (first >> 1 & 3)) << 4);
    }

    // Unconditional: a branch around the load would wait for it. Volatile: the load must not move before the fence.
    __device__ __forceinline__ void fetch(int piece) {
        const unsigned short* plane = x < 0 ? before : x < X ? volume + x * pitch : behind;
        plane = (plane ? plane : volume) + piece * 32;
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(loaded[k].x), "=r"(loaded[k].y), "=r"(loaded[k].z), "=r"(loaded[k].w)
                         : "l"(plane + offset[k])
                         : "memory");
    }

    __device__ __forceinline__ void wait_for_loaders() { asm volatile("bar.sync 1, %0;" ::"n"(LOADING) : "memory"); }

    __device__ __forceinline__ void read_table(int piece) {
#pragma unroll
        for (int c = 0; c < 4; c++)
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(by[c][0]), "=f"(by[c][1]), "=f"(by[c][2]), "=f"(by[c][3])
                         : "r"(table + (piece * 32 + quarter * 8 + c * 2) * 8));
    }

    // Begins a column at plane x; planes -1 and X are the halo. `channel` is the first of 32 * PIECES.
    __device__ __forceinline__ void begin(
        const Map& map, const Halo& halo, const Affine& affine, int channel, int n, int x_, int y0, int z0, int X_,
        int Y, int Z) {
        if (n != sample) {
            sample = n;
            wait_for_loaders();  // until no thread reads the previous sample's table
            const int own = first * 4 + quarter;
            if (own < PIECES * 32) {
                float scale, shift;
                load_affine(affine, n, channel + own, scale, shift);
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(table + own * 8), "f"(scale), "f"(shift) : "memory");
            }
            wait_for_loaders();
            if (PIECES == 1) read_table(0);
        }
        const int own = channel + quarter * 8;
        volume = map.data + n * map.sample + own;
        before = halo.before ? halo.before + n * halo.sample + own : nullptr;
        behind = halo.behind ? halo.behind + n * halo.sample + own : nullptr;
        pitch = map.x, x = x_, X = X_, inside = 0;
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int voxel = first + STEP * k, y = y0 + voxel / WIDTH, z = z0 + voxel % WIDTH;
            const bool in = voxel < VOXELS && y >= 0 && y < Y && z >= 0 && z < Z;
            offset[k] = in ? y * map.y + z * map.z : 0;
            inside |= (u32)in << k;
        }
        fetch(0);
    }

    // Normalises the 32 channels of a plane that were fetched; their slot may still be in use.
    __device__ __forceinline__ void normalize(int piece, float slope) {
        if (PIECES > 1) read_table(piece);
        const u32 known = (x < 0 ? before : x < X ? volume : behind) ? inside : 0;
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            u32* word[4] = {&loaded[k].x, &loaded[k].y, &loaded[k].z, &loaded[k].w};
            const u32 keep = 0u - (known >> k & 1);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                float low, high;
                unpack(*word[c], low, high);
                low = fmaf(low, by[c][0], by[c][1]), high = fmaf(high, by[c][2], by[c][3]);
                *word[c] = pack(fmaxf(low, low * slope), fmaxf(high, high * slope)) & keep;
                pin(*word[c]);  // so that it is computed here, and not after a wait
            }
        }
    }

    // Stores the normalised channels to a slot, and fetches the next 32.
    __device__ __forceinline__ void store(int piece, u32 slot, u32 full) {
        const u32 at = to + slot;
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            if (k < COUNT - 1 || first + STEP * k < VOXELS)
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at + k * STEP * 64), "r"(loaded[k].x),
                             "r"(loaded[k].y), "r"(loaded[k].z), "r"(loaded[k].w)
                             : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the next loads: it would wait for them
        arrive(full);
        if (++piece == PIECES) piece = 0, x++;
        fetch(piece);
    }
};
