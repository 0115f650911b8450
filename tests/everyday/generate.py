"""Generative models, and learning by reward."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

from .nets import mlp
from .script import script


@script()
def gan(parallel, log):
    """Two models, two optimizers: the discriminator sees fakes that are detached, the generator goes through it."""
    real = torch.randn(3, 8, 6)
    generator = parallel(mlp(4, 12, 6), (torch.randn(8, 4),))
    discriminator = parallel(mlp(6, 12, 1, activation=nn.Tanh), (real[0],))
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    criterion, ones, zeros = nn.BCEWithLogitsLoss(), torch.ones(8, 1), torch.zeros(8, 1)
    for batch in real:
        fake = generator(torch.randn(8, 4))
        of_d.zero_grad()
        loss_d = criterion(discriminator(batch), ones) + criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        of_d.step()
        of_g.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        of_g.step()
        log(d=loss_d.item(), g=loss_g.item())


@script()
def wasserstein_gan_with_clipped_weights(parallel, log):
    """The critic takes two steps for one of the generator's, and its weights are clamped after each."""
    real = torch.randn(8, 6)
    generator = parallel(mlp(4, 12, 6), (torch.randn(8, 4),))
    critic = parallel(mlp(6, 12, 1), (real,))
    of_g, of_c = (torch.optim.RMSprop(m.parameters(), lr=1e-3) for m in (generator, critic))
    for _ in range(2):
        for _ in range(2):
            with torch.no_grad():
                fake = generator(torch.randn(8, 4))
            loss = critic(fake).mean() - critic(real).mean()
            of_c.zero_grad()
            loss.backward()
            of_c.step()
            for p in critic.parameters():
                p.data.clamp_(-0.1, 0.1)
            log(critic=loss.item())
        critic.requires_grad_(False)
        loss = -critic(generator(torch.randn(8, 4))).mean()
        of_g.zero_grad()
        loss.backward()
        of_g.step()
        critic.requires_grad_(True)
        log(generator=loss.item())


@script()
def gradient_penalty(parallel, log):
    """WGAN-GP: the norm of the critic's gradient by its input is part of the loss."""
    real, fake = torch.randn(8, 6), torch.randn(8, 6)
    critic = parallel(mlp(6, 12, 1, activation=nn.Tanh), (real,))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(2):
        share = torch.rand(8, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), penalty=penalty.item())


@script()
def vae(parallel, log):
    """The noise of the reparametrization is an input; the loss is outside and has its weight warmed up."""

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.mu, self.log_variance = mlp(8, 12), nn.Linear(12, 3), nn.Linear(12, 3)
            self.decoder = mlp(3, 12, 8)

        def forward(self, x, noise):
            h = F.relu(self.encoder(x))
            mu, log_variance = self.mu(h), self.log_variance(h)
            return self.decoder(mu + noise * torch.exp(0.5 * log_variance)), mu, log_variance

    x = torch.rand(10, 8)
    model = parallel(VAE(), (x, torch.randn(10, 3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(3):
        out, mu, log_variance = model(x, torch.randn(10, 3))
        reconstruction = F.binary_cross_entropy_with_logits(out, x, reduction="sum") / len(x)
        kl = -0.5 * torch.sum(1 + log_variance - mu.pow(2) - log_variance.exp()) / len(x)
        loss = reconstruction + min(1.0, step / 2) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), kl=kl.item(), latent=mu.detach().numpy())


@script()
def vae_that_draws_its_noise(parallel, log):
    """The model draws: its numbers are not eager's, so only what does not depend on them is compared."""

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(8, 12, 6), mlp(3, 12, 8)

        def forward(self, x):
            mu, log_variance = self.encoder(x).chunk(2, -1)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_variance)
            return self.decoder(z), mu, log_variance, z

    x = torch.rand(16, 8)
    model = parallel(VAE(), (x,))
    with torch.no_grad():
        _, mu, log_variance, z = model(x)
        noise = (z - mu) / torch.exp(0.5 * log_variance)
        again = (model(x)[3] - mu) / torch.exp(0.5 * log_variance)
    log(mu=mu, differs=bool((noise != again).all()), all_differ=noise.unique().numel() == noise.numel())
    log(mean_is_near=abs(noise.mean().item()) < 0.6, deviation_is_near=abs(noise.std().item() - 1) < 0.5)


@script()
def diffusion(parallel, log):
    """The noise is predicted at drawn times, an average of the weights is sampled from."""

    class Denoiser(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(8 + 8, 24, 8, activation=nn.SiLU)

        def forward(self, x, t):
            frequency = torch.exp(-math.log(100) * torch.arange(4, dtype=x.dtype) / 4)
            angles = t[:, None] * frequency
            return self.net(torch.cat([x, angles.sin(), angles.cos()], -1))

    data = torch.randn(8, 8)
    keep = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10), 0)
    model = parallel(Denoiser(), (data, torch.zeros(8, dtype=torch.long)))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        t, noise = torch.randint(0, 10, (8,)), torch.randn_like(data)
        scale = keep[t][:, None]
        loss = F.mse_loss(model(scale.sqrt() * data + (1 - scale).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        log(loss=loss.item())
    average.eval()
    x = torch.randn(8, 8)
    with torch.no_grad():
        for step in reversed(range(8, 10)):
            predicted = average(x, torch.full((8,), step))
            x = (x - (1 - keep[step]).sqrt() * predicted) / keep[step].sqrt()
    log(samples=x)


@script()
def denoising_autoencoder(parallel, log):
    """Inputs are corrupted on the way in; features of the encoder alone serve afterwards."""

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(8, 4), mlp(4, 8)

        def forward(self, x):
            code = torch.relu(self.encoder(x))
            return self.decoder(code), code

    x = torch.randn(12, 8)
    model = parallel(Autoencoder(), (x,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        out, code = model(x * (torch.rand_like(x) > 0.2))
        loss = F.mse_loss(out, x) + 1e-3 * code.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())
    with torch.no_grad():
        features = model(x)[1].numpy()
    log(components=features.mean(0), used=int((features > 0).any(0).sum()))


@script()
def policy_gradient(parallel, log):
    """REINFORCE: actions are sampled from the policy's outputs, returns are discounted, an entropy is added."""
    policy = parallel(mlp(4, 12, 3, activation=nn.Tanh), (torch.randn(5, 4),))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(2):
        states, logged, rewards, entropies = torch.randn(5, 4), [], [], []
        for _ in range(4):
            chances = Categorical(logits=policy(states))
            actions = chances.sample()
            logged.append(chances.log_prob(actions))
            entropies.append(chances.entropy())
            rewards.append((actions == 1).to(states) - states[:, 0].abs())
            states = states + 0.1 * F.one_hot(actions, 4)
        returns, value = [], torch.zeros(5)
        for reward in reversed(rewards):
            value = reward + 0.9 * value
            returns.insert(0, value)
        advantage = torch.stack(returns)
        advantage = (advantage - advantage.mean()) / advantage.std()
        loss = -(torch.stack(logged) * advantage).mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), reward=torch.stack(rewards).sum().item())


@script()
def clipped_policy_with_values(parallel, log):
    """PPO: an actor and a critic in one model, several epochs over one batch of experience in minibatches."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.actor, self.critic = mlp(4, 12), nn.Linear(12, 3), nn.Linear(12, 1)

        def forward(self, state):
            h = torch.tanh(self.body(state))
            return self.actor(h), self.critic(h).squeeze(-1)

    states, returns = torch.randn(12, 4), torch.randn(12)
    model = parallel(ActorCritic(), (states,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    with torch.no_grad():
        logits, values = model(states)
        actions = Categorical(logits=logits).sample()
        before = Categorical(logits=logits).log_prob(actions)
        advantages = returns - values
    for _ in range(2):
        for part in torch.randperm(12).split(6):
            logits, values = model(states[part])
            chances = Categorical(logits=logits)
            ratio = (chances.log_prob(actions[part]) - before[part]).exp()
            gain = advantages[part]
            objective = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = -objective + 0.5 * F.mse_loss(values, returns[part]) - 0.01 * chances.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            log(loss=loss.item(), clipped=((ratio - 1).abs() > 0.2).float().mean().item())


@script()
def q_learning_with_a_target(parallel, log):
    """DQN: the target network is a copy that loads the other's values now and then; actions of single states."""
    online = parallel(mlp(4, 12, 3), (torch.randn(8, 4),))
    target = copy.deepcopy(online)
    target.eval()
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-2)
    for step in range(4):
        state, following, reward = torch.randn(8, 4), torch.randn(8, 4), torch.randn(8)
        action, done = torch.randint(0, 3, (8, 1)), torch.rand(8) > 0.8
        value = online(state).gather(1, action).squeeze(1)
        with torch.no_grad():
            wanted = reward + 0.9 * target(following).max(1).values * ~done
        loss = F.huber_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(online.parameters(), 0.05)
        optimizer.step()
        if step % 2:
            target.load_state_dict(online.state_dict())
        with torch.no_grad():
            greedy = online(torch.ones(1, 4)).argmax().item()
        log(loss=loss.item(), greedy=greedy)
